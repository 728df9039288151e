"""`coverage-lab variation`."""

from __future__ import annotations

from typing import Annotated

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, Seed, TracePath
from coverage_lab.wording import counted


def variation(
    trace: TracePath,
    gamma: Annotated[float, typer.Option(help="Coverage of the oracle set; one of those recorded.")] = 0.95,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Show how the needed budget varies over layers, KV heads, steps and requests."""
    from coverage_lab.analyses import variation as analysis
    from coverage_lab.cli import output
    from coverage_lab.trace import Trace

    output.check_outputs(json, csv, figure=figure)
    data = Trace(trace)
    found = analysis.compute(data, gamma, seed)
    needs = analysis.need_map(data, gamma)
    model = data.manifest["run"]["model"]["model"]
    title = f"C*({gamma:g}): {model}, {counted(len(data.shards), 'request')}"
    if not output.write_records(found.to_dicts(), json, csv):
        screen = output.console()
        rows = [
            [
                line["quantity"],
                output.number(line["value"], 2),
                f"{output.number(line['ci_low'], 2)}..{output.number(line['ci_high'], 2)}",
                line["paper"] or "-",
            ]
            for line in found.to_dicts()
        ]
        columns = ["quantity", "ours", "95% interval", "paper,\nLlama-3.1-8B"]
        output.print_table(screen, f"Pages of {title}", columns, rows)
        if not quiet:
            screen.print(
                f"C*({gamma:g}) is the fewest pages that hold {gamma:.3g} of a row's attention mass. "
                "Rows count alike, whatever their context.",
                highlight=False,
                soft_wrap=True,
            )
            by_layer = needs.group_by("layer").mean().sort("fraction", descending=True)
            layers = [int(layer) for layer in by_layer["layer"]]
            fractions = [float(fraction) for fraction in by_layer["fraction"]]
            screen.print(
                f"By layer the mean need goes from {output.percent(fractions[0])} of the context "
                f"(layer {layers[0]}) to {output.percent(fractions[-1])} (layer {layers[-1]}).",
                highlight=False,
            )
    if figure:
        output.save_figure(analysis.figure(needs, f"Mean size of {title}"), figure)
