"""`coverage-lab balance`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet


def balance(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="[TRACE]", help="Trace whose page counts are taken; drawn lists without."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy whose counts are taken.")] = "mvar/coverage:0.98",
    shape: Annotated[
        str, typer.Option(help="Tokens of context x requests; k is 1,024 (131k: 131,072).")
    ] = "32kx16",
    kept: Annotated[float, typer.Option(help="Fraction of the pages that drawn lists keep.")] = 0.22,
    cv: Annotated[float, typer.Option(help="Spread of the lengths of drawn lists.")] = 0.75,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    multiprocessors: Annotated[int, typer.Option(help="Of the GPU; an H200 has 132.")] = 132,
    resident: Annotated[int, typer.Option(help="Thread blocks that a multiprocessor runs at a time.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lists.")] = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Show how kernels divide ragged page lists among thread blocks; needs no GPU."""
    from coverage_lab.analyses import balance as analysis
    from coverage_lab.bench import lengths
    from coverage_lab.bench.shapes import Geometry, Shape
    from coverage_lab.cli import output
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.kernels.ragged import MOST_ROWS
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.trace import Trace

    output.check_outputs(json, csv, figure=figure)
    if multiprocessors < 1 or resident < 1:
        raise CoverageLabError("--multiprocessors and --resident must be positive")
    geometry, where = Geometry(kv_heads=kv_heads, page_size=page_size), Shape.parse(shape)
    pages, rows = geometry.pages(where), geometry.rows(where)
    lengths.check_kept(kept)
    if rows > MOST_ROWS:
        raise CoverageLabError(
            f"shape {where} has {rows} rows (requests x KV heads); at most {MOST_ROWS} are possible"
        )
    gpu = analysis.Gpu(multiprocessors=multiprocessors, resident=resident, page_size=page_size)
    parsed = parse_policy(policy)
    if trace is not None:
        counts = lengths.of_trace(Trace(trace), parsed, where.batch, kv_heads, pages, seed).ravel()
    else:
        counts = lengths.drawn(rows, pages, kept, cv, seed)
    table = analysis.compute(counts, gpu)
    spread = counts.std() / counts.mean()
    head = {
        "analysis": "balance",
        "command": shlex.join(["coverage-lab", *sys.argv[1:]]),
        "lists": {
            "rows": rows,
            "pages": pages,
            "kept": counts.mean() / pages,
            "cv": counts.std() / counts.mean(),
        },
    }
    if not output.write_records(table.to_dicts(), json, csv, head):
        screen = output.console()
        title = (
            f"{rows} lists at {where}: {counts.mean() / pages:.1%} of {pages} pages, CV {spread:.2f}; "
            f"{multiprocessors} multiprocessors, {resident} blocks each"
        )
        columns = [
            "scheme",
            "blocks",
            "pages read\nover selected",
            "most pages\nof a block",
            "time over\neven",
            "host must\nknow",
        ]
        lines = [
            [
                line["title"],
                f"{line['blocks']:,}",
                output.number(line["reads"], 2),
                str(line["most"]),
                output.number(line["over_even"], 2),
                "yes" if line["host"] else "no",
            ]
            for line in table.to_dicts()
        ]
        output.print_table(screen, title, columns, lines, ["blocks", "most pages\nof a block"])
        if not quiet:
            screen.print(
                "Time: until the last block ends, if a page takes the same time everywhere; 1 is an even "
                "division of the selected pages.",
                highlight=False,
                soft_wrap=True,
            )
    if figure:
        output.save_figure(analysis.figure(counts, gpu), figure)
