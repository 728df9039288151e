"""`coverage-lab replay`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, Seed, TracePath

DEFAULT = ("mvar/coverage:0.98",)


def replay(
    context: typer.Context,
    trace: TracePath,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies", metavar="POLICY...", help="Decode under these.", show_default="mvar/coverage:0.98"
        ),
    ] = None,
    lists: Annotated[
        str,
        typer.Option(help="live: the sparse run's queries choose; recorded: those of the dense run."),
    ] = "live",
    model: Annotated[
        str | None, typer.Option(help="Where the traced model is now, if not where it was.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU if any.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many requests.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="At most this many steps a request.")] = None,
    to: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep what is finished in this file; an unfinished run goes on."),
    ] = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Feed recorded tokens to the model under policies, and compare what it predicts with dense attention."""
    from rich.console import Console

    from coverage_lab.analyses import divergence
    from coverage_lab.cli import output
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.replay import report
    from coverage_lab.trace import Trace

    output.check_outputs(to, json, csv, figure=figure)
    if context.args and not policies:
        raise CoverageLabError(f"unexpected argument {context.args[0]!r}; policies come after --policies")
    if lists not in ("live", "recorded"):
        raise CoverageLabError(f"--lists {lists} is not live or recorded")
    asked = [parse_policy(text) for text in [*(policies or DEFAULT), *context.args]]
    data = Trace(trace)
    console = Console(stderr=True)

    def progress(request: str, done: int, runs: int) -> None:
        if console.is_terminal:
            status.update(f"{request}: {done} of {runs} runs")
        elif not quiet:
            console.print(f"{request}: {done} of {runs} runs", highlight=False)

    with console.status("loading the model") as status:
        if quiet:
            status.stop()
        loaded = report.load_traced_model(data, model, device)
        records = report.replay(
            data,
            loaded,
            asked,
            lists=lists,  # type: ignore[arg-type]
            limit=limit,
            steps=steps,
            output=to,
            progress=progress,
        )
    found = report.summarize(records, seed)
    poor = sorted({record["request_id"] for record in records if record["degenerate"]})
    if poor and not quiet:
        print(
            f"the dense model says the same over and over in {', '.join(poor)}: figures mean little there",
            file=sys.stderr,
        )
    if not output.write_records(records, json, csv):
        rows = [
            [
                line["policy"],
                output.percent(line["reads"]),
                output.percent(line["reads_metadata"]),
                output.number(line["pages_over_oracle"], 2),
                f"{line['kl_mean']:.2g}",
                f"{line['ci_low']:.2g}..{line['ci_high']:.2g}" if line["requests"] > 1 else "-",
                "-"
                if math.isnan(line["vs_first_low"])
                else f"{line['vs_first_low']:+.2g}..{line['vs_first_high']:+.2g}",
                f"{line['kl_p99']:.2g}",
                output.percent(line["agreement"]),
                output.number(line["coverage_mean"], 3),
            ]
            for line in found
        ]
        screen = output.console()
        columns = [
            "policy",
            "reads",
            "meta-\ndata",
            "pages /\noracle",
            "KL to dense,\nnats",
            "95% interval",
            "less the\nfirst, 95%",
            "worst\np99",
            "same\ntop-1",
            "mean\ncoverage",
        ]
        title = (
            f"{loaded.identity['model']} under policies, {lists} lists: {found[0]['requests']} requests, "
            f"{found[0]['steps']} steps"
        )
        output.print_table(
            screen, title, columns, rows, ["meta-\ndata", "worst\np99", "mean\ncoverage", "pages /\noracle"]
        )
        if not quiet:
            screen.print(
                f"{report.CONTROL} keeps every page: its divergence is numerical error. Metadata: what the "
                "estimate reads besides. Oracle: the pages of C*(0.95).",
                highlight=False,
                soft_wrap=True,
            )
    if figure:
        output.save_figure(divergence.figure(divergence.to_frame(found)), figure)


def _range(low: float, high: float, form: str) -> str:
    # The first policy differs from itself by nothing.
    return "-" if math.isnan(low) or low == high == 0 else f"{low:{form}}..{high:{form}}"
