"""`coverage-lab report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.cli.options import CsvPath, JsonPath, Quiet, Seed


def report(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Directories written by `coverage-lab collect`.")
    ],
    to: Annotated[Path, typer.Option("--output", "-o", help="The page, for example report.html.")],
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    quiet: Quiet = False,
) -> None:
    """Write one page with every analysis of some traces, beside the paper's figures; it needs no network.

    --json and --csv have what stands beside the paper.
    """
    from coverage_lab.analyses import report as page
    from coverage_lab.cli import output
    from coverage_lab.cli.running import running
    from coverage_lab.trace import Trace

    output.check_outputs(to, json, csv)
    opened = [Trace(path) for path in traces]
    with running(quiet, "reading the traces", "analyses") as progress:
        made = page.build(opened, seed, progress)
    output.write_text(to, made.html)
    to_screen = output.write_records(made.findings, json, csv)
    if not quiet and to != output.STDOUT and not to_screen:
        print(f"{to}: traces: {len(opened)}, {len(made.html) / 1e6:.1f} MB")
