"""`coverage-lab compare-policies`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, Seed, TracePath


def compare_policies(
    trace: TracePath,
    more: Annotated[list[str] | None, typer.Argument(metavar="[POLICY]...", hidden=True)] = None,
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
    anchor: Annotated[str, typer.Option(help="Same reads: the policy whose reads all others match.")] = (
        "mvar/coverage:0.98"
    ),
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
    if more and not policies:
        raise CoverageLabError(f"unexpected argument {more[0]!r}; policies come after --policies")
    data = Trace(trace)
    with PassProgress(quiet) as progress:
        if policies:
            records = compare.given(data, [*policies, *(more or [])], target_coverage, seed, progress)
        else:
            records = compare.compare(data, target_coverage, target_rows, anchor, seed, progress)
    if not output.write_records(records, json, csv):
        _print(records, target_coverage, target_rows)
    if figure:
        from coverage_lab.analyses import comparison

        output.save_figure(comparison.figure(comparison.to_frame(records)), figure)


def _print(records: Sequence[dict[str, Any]], target_coverage: float, target_rows: float) -> None:
    from coverage_lab.analyses.comparison import TITLES
    from coverage_lab.cli.output import console, number, percent, table

    screen = console()
    first = records[0]
    for kind, title in TITLES.items():
        lines = [record for record in records if record["table"] == kind]
        if not lines:
            continue
        guarantee = kind == "same_guarantee"
        detail = (
            f"smallest budget with which {target_rows:.0%} of rows keep {target_coverage:g} of the exact mass"
            if guarantee
            else f"reads of {lines[0]['policy']}"
            if kind == "same_reads"
            else f"target {target_coverage:g}"
        )
        interval = "tokens/oracle 95%" if guarantee else "rows below 95%"
        columns = [
            "policy",
            "requested",
            "reads",
            "metadata",
            "tokens/oracle",
            "coverage",
            "p5",
            "p1",
            "rows below",
            interval,
        ]
        rows = [
            [
                line["policy"],
                "-"
                if line["requested"] is None
                else f"{line['requested']:g}"
                if not isinstance(line["requested"], str)
                else line["requested"],
                percent(line["reads"]),
                percent(line["reads_metadata"]),
                number(line["tokens_over_oracle"], 2),
                number(line["coverage_mean"]),
                number(line["coverage_p5"]),
                number(line["coverage_p1"]),
                percent(line["rows_below_target"]),
                _interval(line, guarantee),
            ]
            for line in lines
        ]
        screen.print(table(f"{title}: {detail}", columns, rows))
    notes = dict.fromkeys(
        f"{TITLES[record['table']]}, {re.split('[/:,]', record['policy'])[1]}: {record['note']}"
        for record in records
        if record["note"] not in ("", "anchor")
    )
    screen.print(
        f"{first['rows']:,} rows of {first['requests']} requests. "
        "Requested is the budget's own number, all else is realised. "
        "Reads are kept pages over all pages; metadata is what the estimate reads beside them.",
        highlight=False,
    )
    for note in notes:
        screen.print(f"{note}", highlight=False, markup=False)


def _interval(line: dict[str, Any], guarantee: bool) -> str:
    from coverage_lab.cli.output import number, percent

    show = (lambda value: number(value, 2)) if guarantee else percent
    low, high = show(line["ci_low"]), show(line["ci_high"])
    return "-" if low == "-" else f"{low}..{high}"
