"""`coverage-lab replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from coverage_lab.cli.options import (
    Backend,
    CsvPath,
    Device,
    FigurePath,
    JsonPath,
    Kept,
    Limit,
    ModelPath,
    Quiet,
    Seed,
    Steps,
    TracePath,
)
from coverage_lab.wording import counted

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
    model: ModelPath = None,
    device: Device = None,
    backend: Backend = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Choose in plain torch too, and count the rows whose lists are alike."),
    ] = False,
    limit: Limit = None,
    steps: Steps = None,
    to: Kept = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Feed recorded tokens to the model under policies, and compare what it predicts with dense attention."""
    from coverage_lab.analyses import divergence
    from coverage_lab.cli import output
    from coverage_lab.cli.running import finish, kept_in, running
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.replay import report
    from coverage_lab.replay.requests import load_traced_model, provenance
    from coverage_lab.trace import Trace

    output.check_outputs(to, json, csv, figure=figure)
    if context.args and not policies:
        raise CoverageLabError(f"unexpected argument {context.args[0]!r}; policies come after --policies")
    if lists not in ("live", "recorded"):
        raise CoverageLabError(f"--lists {lists} is not live or recorded")
    asked = [parse_policy(text) for text in [*(policies or DEFAULT), *context.args]]
    data = Trace(trace)
    with running(quiet, stopped=kept_in(to)) as progress:
        loaded = load_traced_model(data, model, device)
        outcome = report.replay(
            data,
            loaded,
            asked,
            lists=lists,  # type: ignore[arg-type]
            backend=backend,
            check=check,
            limit=limit,
            steps=steps,
            output=to,
            progress=progress,
        )
    records, found = outcome.records, report.summarize(outcome.records, seed)
    # A line a policy in CSV; JSON has the records of every request too.
    head = {
        **provenance(data, loaded, limit=limit, steps=steps, seed=seed),
        "lists": lists,
        "backend": backend,
        "failed": outcome.failed,
        "empty": outcome.empty,
        "summary": found,
    }
    written = output.write_records(records, json, None, head)
    if records:
        counts = counted(found[0]["requests"], "request"), counted(found[0]["steps"], "step")
        title = f"{loaded.identity['model']} under policies, {lists} lists: {', '.join(counts)}"
        written |= output.write_records(found, None, csv)
        if not written:
            show(found, title, quiet)
        if figure:
            output.save_figure(divergence.figure(divergence.to_frame(found), title), figure)
    finish(outcome, quiet)


def show(found: list[dict[str, Any]], title: str, quiet: bool) -> None:
    """Print the lines of a summary as a table."""
    from coverage_lab.cli import output
    from coverage_lab.replay.report import CONTROL

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "policy": lambda line: line["policy"],
        "reads": lambda line: output.percent(line["reads"]),
        "meta-\ndata": lambda line: output.percent(line["reads_metadata"]),
        "pages /\noracle": lambda line: output.number(line["pages_over_oracle"], 2),
        "KL to dense,\nnats": lambda line: f"{line['kl_mean']:.2g}",
        "95% interval": lambda line: output.interval(line["ci_low"], line["ci_high"]),
        "less the\nfirst, 95%": lambda line: output.interval(
            line["vs_first_low"], line["vs_first_high"], "+.2g"
        ),
        "p99": lambda line: f"{line['kl_p99']:.2g}",
        "same\ntop-1": lambda line: output.percent(line["agreement"]),
        "perplexity": lambda line: output.number(line["perplexity"], 2),
        "mean\ncoverage": lambda line: output.number(line["coverage_mean"], 3),
        "rows\n< 0.95": lambda line: output.percent(line["rows_below"]),
        "lists\nalike": lambda line: output.percent(line.get("equal_rows"), 2),
        "backend": lambda line: line["backend"],
    }
    for name, key in (("perplexity", "perplexity"), ("lists\nalike", "equal_rows")):
        if all(line.get(key) is None for line in found):
            del columns[name]
    if len(found) < 3:  # the control and one policy, which is the first
        del columns["less the\nfirst, 95%"]
    rows = [[text(line) for text in columns.values()] for line in found]
    screen = output.console()
    droppable = ["backend", "meta-\ndata", "p99", "rows\n< 0.95", "mean\ncoverage", "pages /\noracle"]
    droppable += ["less the\nfirst, 95%", "same\ntop-1"]
    output.print_table(screen, title, list(columns), rows, [name for name in droppable if name in columns])
    if not quiet:
        said = [f"{CONTROL} keeps every page: its divergence is numerical error."]
        said.append("Metadata: what the choice reads besides. Oracle: the pages of C*(0.95).")
        if len(found) > 2:
            said.append(f"Less the first: less the KL of {found[1]['policy']}.")
        screen.print(" ".join(said), highlight=False, soft_wrap=True)
