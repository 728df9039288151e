"""The command line, `coverage-lab`. One thin file a verb; what a verb needs is imported when it runs."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from coverage_lab import __version__
from coverage_lab.cli import (
    analyze,
    balance,
    bench,
    collect,
    compare_policies,
    datasets,
    explain,
    fit_profile,
    replay,
    report,
    reproduce,
    variation,
)
from coverage_lab.errors import CoverageLabError

app = typer.Typer(
    name="coverage-lab",
    help="Measure how much of the KV cache decoding needs, and compare the rules that choose what to read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"coverage-lab {__version__}")
        raise typer.Exit


app.command("collect")(collect.collect)
# Extra arguments are the second and later ones of --policies.
app.command("compare-policies", context_settings={"allow_extra_args": True})(
    compare_policies.compare_policies
)
app.command("variation")(variation.variation)
app.command("replay", context_settings={"allow_extra_args": True})(replay.replay)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("fit-profile")(fit_profile.fit_profile)
app.command("balance")(balance.balance)
app.add_typer(datasets.app, name="datasets")
app.add_typer(analyze.app, name="analyze")
app.add_typer(bench.app, name="bench")
app.add_typer(reproduce.app, name="reproduce")


def main() -> NoReturn:
    """Run the command line; errors of the user are one line and exit code 2."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except CoverageLabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except _Terminated:
        sys.exit(128 + signal.SIGTERM)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser raises has one
            raise
        message = error.format_message().rstrip(".")
        if message:  # there is none where a command without arguments has shown its help
            print(f"error: {message}; see --help", file=sys.stderr)
        sys.exit(2)


class _Terminated(BaseException):
    """SIGTERM, raised like KeyboardInterrupt so that files are closed and a progress bar ends."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
