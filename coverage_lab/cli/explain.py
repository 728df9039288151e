"""`coverage-lab explain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coverage_lab.cli.options import (
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

# Heads that the table shows.
SHOWN = 10


def explain(
    trace: TracePath,
    policy: Annotated[str, typer.Option(help="What to take apart.")] = "mvar/coverage:0.98",
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="Run every KV head alone, which takes longest.")
    ] = True,
    model: ModelPath = None,
    device: Device = None,
    limit: Limit = None,
    steps: Steps = None,
    to: Kept = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Say why a policy moves the answer: which KV heads carry the divergence, and what is at fault there."""
    from coverage_lab.analyses import head_divergence
    from coverage_lab.cli import output
    from coverage_lab.cli.running import finish, kept_in, running
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.replay import explain as explaining
    from coverage_lab.replay.requests import load_traced_model, provenance
    from coverage_lab.trace import Trace

    output.check_outputs(to, json, csv, figure=figure)
    if figure and not heads:
        raise CoverageLabError("--figure draws the KV heads; leave out --no-heads")
    asked, data = parse_policy(policy), Trace(trace)
    with running(quiet, stopped=kept_in(to)) as progress:
        loaded = load_traced_model(data, model, device)
        outcome = explaining.explain(
            data, loaded, asked, heads=heads, limit=limit, steps=steps, output=to, progress=progress
        )
    lines = explaining.summarize(outcome.records, seed)
    head = {
        "policy": str(asked),
        **provenance(data, loaded, limit=limit, steps=steps, seed=seed),
        "failed": outcome.failed,
    }
    title = f"{loaded.identity['model']} under {asked}"
    if lines:
        title += f": {counted(lines[0]['requests'], 'request')}"
    if not output.write_records(lines, json, csv, head):
        show(lines, title)
    if figure and outcome.records:
        output.save_figure(head_divergence.figure(head_divergence.to_frame(lines), title), figure)
    finish(outcome, quiet)


def show(lines: list[dict[str, Any]], title: str) -> None:
    """Print the variants and the worst KV heads as tables."""
    from coverage_lab.cli import output

    screen = output.console()
    variants = [line for line in lines if line["what"] == "variants"]
    heads = [line for line in lines if line["what"] == "heads"]
    if not variants:
        return
    rows = [
        [
            line["variant"],
            output.percent(line["reads"]),
            f"{line['kl']:.2g}",
            output.interval(line["ci_low"], line["ci_high"]),
            output.number(line["coverage_mean"], 3),
        ]
        for line in variants
    ]
    columns = ["lists", "reads", "KL to dense,\nnats", "95% interval", "mean\ncoverage"]
    output.print_table(screen, title, columns, rows, ["mean\ncoverage", "95% interval"])
    if not heads:
        return
    rows = [
        [
            f"layer {line['layer']}, KV head {line['kv_head']}",
            f"{line['kl']:.2g}",
            output.percent(line["share"]),
            output.number(line["log_error"], 2),
            output.percent(line["reads"]),
            output.number(line["coverage_mean"], 3),
            output.number(line["coverage_low"], 3),
        ]
        for line in heads[:SHOWN]
    ]
    columns = [
        "it alone follows",
        "KL to dense,\nnats",
        "of the sum\nof all",
        "log of estimated\nover exact mass",
        "reads",
        "mean\ncoverage",
        "lowest\ncoverage",
    ]
    droppable = ["lowest\ncoverage", "mean\ncoverage", "log of estimated\nover exact mass", "reads"]
    output.print_table(screen, f"The {len(rows)} worst of {len(heads)} KV heads", columns, rows, droppable)
    screen.print(
        "KL: of a run in which the head alone follows the policy; its part of the sum leaves out numerical "
        "error. All else: of the run in which all follow.",
        highlight=False,
        soft_wrap=True,
    )
