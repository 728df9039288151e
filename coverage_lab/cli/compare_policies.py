"""`coverage-lab compare-policies`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, Seed, TracePath
from coverage_lab.wording import counted


def compare_policies(
    context: typer.Context,
    trace: TracePath,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            metavar="POLICY...",
            help="Evaluate these as they are, for example `exact/coverage:0.95 mvar/fixed:90`.",
        ),
    ] = None,
    target_coverage: Annotated[float, typer.Option(help="Exact mass that a row should keep.")] = 0.95,
    target_rows: Annotated[
        float, typer.Option(help="Same guarantee: fraction of rows that should keep it.")
    ] = 0.9,
    anchor: Annotated[
        str | None,
        typer.Option(
            help="Same reads: the policy whose reads all others match.", show_default="mvar/coverage:0.98"
        ),
    ] = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Compare budgets on a trace: what the same guarantee costs, and what the same reads keep."""
    from coverage_lab.cli import output
    from coverage_lab.cli.progress import PassProgress
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.policies import compare
    from coverage_lab.trace import Trace

    output.check_outputs(json, csv, figure=figure)
    if context.args and not policies:
        raise CoverageLabError(f"unexpected argument {context.args[0]!r}; policies come after --policies")
    if policies and anchor:
        raise CoverageLabError(
            "--anchor is for matched reads; with --policies nothing is matched, leave it out"
        )
    if not trace.exists() and re.fullmatch(r"[a-z]+/[a-z]+(:.*)?", str(trace)):
        raise CoverageLabError(
            "the trace comes first: coverage-lab compare-policies TRACE --policies POLICY..."
        )
    data = Trace(trace)
    with PassProgress(quiet) as progress:
        if policies:
            records = compare.given(data, [*policies, *context.args], target_coverage, seed, progress)
        else:
            records = compare.compare(data, target_coverage, target_rows, anchor, seed, progress)
    if not output.write_records(records, json, csv):
        _print(records, target_coverage, target_rows)
    if figure:
        from coverage_lab.analyses import comparison

        output.save_figure(comparison.figure(comparison.to_frame(records)), figure)


FEW_REQUESTS = 10

# Columns that a narrow screen goes without, the first one first.
_DROPPABLE = ("metadata", "coverage\np1", "requested", "coverage\nmean", "coverage\np5")


def _print(records: Sequence[dict[str, Any]], target_coverage: float, target_rows: float) -> None:
    from coverage_lab.analyses.comparison import TITLES
    from coverage_lab.cli.output import console, number, percent, print_table

    below = f"rows below\n{target_coverage:g}"
    anchor = next((record["policy"] for record in records if record["note"] == "anchor"), "")
    details = {
        "same_guarantee": f"budgets that give {target_rows:.0%} of rows {target_coverage:g} of their mass",
        "same_reads": f"budgets that read as much as {anchor}",
        "given": "",
    }
    screen = console()
    for kind, title in TITLES.items():
        lines = [record for record in records if record["table"] == kind]
        if not lines:
            continue
        guarantee = kind == "same_guarantee"
        cells: dict[str, list[str]] = {
            "policy": [line["policy"] for line in lines],
            "requested": ["-" if line["requested"] is None else f"{line['requested']:.5g}" for line in lines],
            "reads": [percent(line["reads"]) for line in lines],
            "metadata": [percent(line["reads_metadata"]) for line in lines],
            "tokens\n/ oracle": [number(line["tokens_over_oracle"], 2) for line in lines],
            "coverage\nmean": [number(line["coverage_mean"]) for line in lines],
            "coverage\np5": [number(line["coverage_p5"]) for line in lines],
            "coverage\np1": [number(line["coverage_p1"]) for line in lines],
            below: [percent(line["rows_below_target"]) for line in lines],
            "tokens / oracle\n95% interval" if guarantee else "rows below\n95% interval": [
                _interval(line, guarantee) for line in lines
            ],
        }
        if kind == "same_reads":
            cells["more than the anchor\npoints, 95%, paired"] = [_signed_interval(line) for line in lines]
        heading = ": ".join(filter(None, [title, details[kind]]))
        print_table(screen, heading, list(cells), list(zip(*cells.values(), strict=True)), _DROPPABLE)
    requests = records[0]["requests"]
    explained = (
        f"{counted(records[0]['rows'], 'row')} of {counted(requests, 'request')}. "
        "Requested is the budget's own number, all else is realised. "
        "Reads are kept pages over all pages; metadata is what the estimate reads beside them "
        "(exact reads every key)."
    )
    warning = ""
    if requests == 1:
        warning = "One request: no profiles, which are judged on other requests, and no intervals."
    elif requests < FEW_REQUESTS:
        warning = f"Intervals resample requests; {requests} are too few to trust them."
    for line in filter(None, (explained, warning, *_notes(records))):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)


def _notes(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for every note of a table, with what it holds for: whole budgets, or single policies."""
    from coverage_lab.analyses.comparison import TITLES

    found: dict[tuple[str, str], list[str]] = {}
    members: dict[tuple[str, str], int] = {}
    for record in records:
        policy = re.sub(r":(?!per-).*|,.*", "", record["policy"])
        table, budget = record["table"], policy.split("/", 1)[1].partition(":")[0]
        members[table, budget] = members.get((table, budget), 0) + 1
        for note in record["note"].split("; "):
            if note not in ("", "anchor"):
                found.setdefault((table, note), []).append(policy)
    lines = []
    for (table, note), policies in found.items():
        budgets = {policy.split("/", 1)[1].partition(":")[0] for policy in policies}
        whole = len(policies) == sum(members[table, budget] for budget in budgets)
        lines.append(f"{TITLES[table]}, {', '.join(budgets if whole else policies)}: {note}")
    return lines


def _signed_interval(line: dict[str, Any]) -> str:
    low, high = line["vs_anchor_low"], line["vs_anchor_high"]
    return "-" if low is None or math.isnan(low) else f"{100 * low:+.1f}..{100 * high:+.1f}"


def _interval(line: dict[str, Any], guarantee: bool) -> str:
    from coverage_lab.cli.output import number, percent

    show = (lambda value: number(value, 2)) if guarantee else percent
    low, high = show(line["ci_low"]), show(line["ci_high"])
    return "-" if low == "-" else f"{low}..{high}"
