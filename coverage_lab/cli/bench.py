"""`coverage-lab bench attend|path|select`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, names, numbers

if TYPE_CHECKING:
    import torch

    from coverage_lab.bench.shapes import Geometry, Shape

app = typer.Typer(
    help="Time the kernels, each after a check in the same run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

GPU_SHAPES = "8kx32,32kx16,64kx8,131kx4"
CPU_SHAPES = "2kx2"

Shapes = Annotated[
    str | None,
    typer.Option(
        help="Tokens of context x requests, comma-separated.",
        show_default=f"{GPU_SHAPES}; {CPU_SHAPES} without a GPU",
    ),
]
KvHeads = Annotated[int, typer.Option(help="KV heads.")]
Group = Annotated[int, typer.Option(help="Query heads a KV head.")]
HeadDim = Annotated[int, typer.Option(help="Head dimension.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if any.")]
Estimator = Annotated[str, typer.Option(help="mvar, mean or quest.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of keys, values, queries and lists.")]


@app.command()
def attend(
    shapes: Shapes = None,
    kept: Annotated[float, typer.Option(help="Fraction of the pages that drawn lists keep.")] = 0.22,
    cv: Annotated[str, typer.Option(help="Spreads of the lists' lengths, comma-separated.")] = (
        "0,0.25,0.5,0.75,1,1.2"
    ),
    trace: Annotated[
        Path | None, typer.Option(help="Trace whose page counts give further lists, as fractions.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policy whose counts are taken of the trace.")
    ] = "mvar/coverage:0.98",
    baselines: Annotated[
        str | None, typer.Option(help="Comma-separated; all that can run here by default, or none.")
    ] = None,
    kv_heads: KvHeads = 8,
    group: Group = 4,
    head_dim: HeadDim = 128,
    page_size: PageSize = 64,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    figure: FigurePath = None,
    quiet: Quiet = False,
) -> None:
    """Time attention over ragged page lists, ours and others' (the paper's Fig. 4 and Table 6)."""
    from coverage_lab.analyses import attend_time
    from coverage_lab.bench import attend as bench
    from coverage_lab.cli import output
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.trace import Trace

    output.check_outputs(json, csv, figure=figure)
    place, shape_list, geometry = _set_up(
        shapes, device, quiet, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    options = bench.AttendOptions(
        shapes=shape_list,
        geometry=geometry,
        kept=kept,
        cvs=numbers(cv, "--cv"),
        trace=Trace(trace) if trace else None,
        policy=parse_policy(policy),
        baselines=_baselines(baselines, place, geometry, quiet),
        strict=baselines is not None,
        seed=seed,
    )
    records = _run(lambda say: bench.run(options, place, say), quiet)
    if not _write(records, "attend", geometry, place, json, csv):
        columns = [
            "shape", "lists", "CV", "kept", "method", "us", "host\nplan us", "GB/s", "of dense\nbandwidth",
            "over\nfloor", "over\nattend",
        ]  # fmt: skip
        rows = [
            [
                line["shape"],
                line["lists"],
                output.number(line["cv"], 2),
                output.percent(line["kept"]),
                line["method"],
                output.number(line["us"], 1),
                output.number(line["plan_us"], 0),
                output.number(line["gbps"], 0),
                output.percent(line["of_dense_bandwidth"]),
                output.number(line["over_floor"], 2),
                output.number(line["over_attend"], 2),
            ]
            for line in records
        ]
        screen = output.console()
        output.print_table(
            screen, _title("Attention, one layer", geometry), columns, rows, ["of dense\nbandwidth"]
        )
        if not quiet:
            screen.print(
                "us: median over CUDA graph replays, level-2 cache cold, results checked against float32. "
                "Floor: the selected bytes at the best bandwidth that dense attention reaches here.",
                highlight=False,
                soft_wrap=True,
            )
    if figure:
        output.save_figure(attend_time.figure(attend_time.to_frame(records)), figure)


@app.command()
def path(
    shapes: Shapes = None,
    reads: Annotated[
        str | None,
        typer.Option(
            help="Fraction of the pages that each shape keeps, comma-separated.",
            show_default="the paper's at its contexts, else 0.22",
        ),
    ] = None,
    estimator: Estimator = "mvar",
    kv_heads: KvHeads = 8,
    group: Group = 4,
    head_dim: HeadDim = 128,
    page_size: PageSize = 64,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    quiet: Quiet = False,
) -> None:
    """Time Estimate, Select, Attend and Merge together, against dense attention (paper 5.5.4)."""
    from coverage_lab.bench import path as bench
    from coverage_lab.bench.select import SelectOptions
    from coverage_lab.cli import output

    output.check_outputs(json, csv)
    place, shape_list, geometry = _set_up(
        shapes, device, quiet, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    options = SelectOptions(
        shapes=shape_list,
        geometry=geometry,
        reads=numbers(reads, "--reads") if reads else (),
        estimator=estimator,  # type: ignore[arg-type]
        seed=seed,
    )
    records = _run(lambda say: bench.run(options, place, say), quiet)
    if not _write(records, "path", geometry, place, json, csv):
        stages = list(dict.fromkeys(line["stage"] for line in records))
        rows = []
        for shape in dict.fromkeys(line["shape"] for line in records):
            of = {line["stage"]: line for line in records if line["shape"] == shape}
            first = of["path"]
            rows.append(
                [
                    shape,
                    output.percent(first["kept"]),
                    output.number(first["cv"], 2),
                    output.number(first["gamma"], 4),
                    *(output.number(of[stage]["us"], 1) for stage in stages),
                    output.number(first["dense_over"], 2),
                ]
            )
        columns = ["shape", "kept", "CV", "gamma", *(f"{stage}\nus" for stage in stages), "dense\nover path"]
        output.print_table(output.console(), _title("Decode path, one layer", geometry), columns, rows)


@app.command()
def select(
    shapes: Shapes = None,
    gamma: Annotated[float, typer.Option(help="Coverage of the rule.")] = 0.98,
    estimator: Estimator = "mvar",
    kv_heads: KvHeads = 8,
    group: Group = 4,
    head_dim: HeadDim = 128,
    page_size: PageSize = 64,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    seed: Seed = 0,
    json: JsonPath = None,
    csv: CsvPath = None,
    quiet: Quiet = False,
) -> None:
    """Time Estimate and Select, and the coverage rule by sorting (paper 3.4, appendix A)."""
    from coverage_lab.bench import select as bench
    from coverage_lab.cli import output

    output.check_outputs(json, csv)
    place, shape_list, geometry = _set_up(
        shapes, device, quiet, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    options = bench.SelectOptions(
        shapes=shape_list,
        geometry=geometry,
        gamma=gamma,
        estimator=estimator,  # type: ignore[arg-type]
        seed=seed,
    )
    records = _run(lambda say: bench.run(options, place, say), quiet)
    if not _write(records, "select", geometry, place, json, csv):
        rows = [
            [
                line["shape"],
                str(line["pages"]),
                output.percent(line["kept"]),
                output.number(line["cv"], 2),
                line["stage"],
                output.number(line["us"], 1),
            ]
            for line in records
        ]
        columns = ["shape", "pages", "kept", "CV", "stage", "us"]
        output.print_table(output.console(), _title("Selection, one layer", geometry), columns, rows)


def _set_up(
    shapes: str | None, device: str | None, quiet: bool, **geometry: Any
) -> tuple[torch.device, list[Shape], Geometry]:
    """Return the device, shapes and geometry that options name."""
    import torch

    from coverage_lab.bench.shapes import Geometry, Shape
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.kernels.cache import check_geometry
    from coverage_lab.kernels.device import backend
    from coverage_lab.kernels.ragged import MOST_ROWS

    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise CoverageLabError(f"--device {device} is not a device; cpu, cuda and cuda:1 are")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise CoverageLabError(f"--device {device}: there is no such CUDA device; leave the option out")
    layer = Geometry(**geometry)
    try:
        check_geometry(layer.head_dim, layer.page_size, layer.group)
    except ValueError as error:
        raise CoverageLabError(str(error)) from None
    found = [
        Shape.parse(text) for text in names(shapes or (GPU_SHAPES if place.type == "cuda" else CPU_SHAPES))
    ]
    if not found:
        raise CoverageLabError(f"--shapes {shapes!r} names no shape; try {CPU_SHAPES}")
    for shape in found:
        if layer.rows(shape) > MOST_ROWS:
            raise CoverageLabError(
                f"shape {shape} has {layer.rows(shape)} rows (requests x KV heads); "
                f"at most {MOST_ROWS} are possible"
            )
    if (place.type == "cpu" or backend(place) == "reference") and not quiet:
        print(
            "no GPU that the kernels run on: plain torch is timed, which says nothing about them",
            file=sys.stderr,
        )
    return place, found, layer


def _baselines(text: str | None, device: torch.device, geometry: Geometry, quiet: bool) -> list[str]:
    """Return the baselines that can run; say on standard error which can't, and why."""
    from coverage_lab.bench.layers import make
    from coverage_lab.bench.shapes import Shape
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.kernels.baselines import baselines

    if text == "none":
        return []
    cache = make(Shape(geometry.page_size, 1), geometry, device, 1, 0)[0].cache
    found = []
    for name in names(text) or baselines.names():
        reason = baselines.get(name).missing(cache)
        if reason is None:
            found.append(name)
        elif names(text):
            raise CoverageLabError(f"baseline {name}: {reason}")
        elif not quiet:
            print(f"left out: {name} ({reason})", file=sys.stderr)
    return found


def _run(work: Callable[[Callable[[str], None]], list[dict[str, Any]]], quiet: bool) -> list[dict[str, Any]]:
    """Run a benchmark, saying on standard error what is under way."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        return work(lambda line: None)
    if not console.is_terminal:
        return work(lambda line: print(line, file=sys.stderr, flush=True))
    with console.status("") as status:
        return work(status.update)


def _write(
    records: Sequence[dict[str, Any]],
    name: str,
    geometry: Geometry,
    device: torch.device,
    json: Path | None,
    csv: Path | None,
) -> bool:
    """Write records where asked, the JSON with the machine; True if they went to standard output."""
    from dataclasses import asdict

    from coverage_lab.bench import machine
    from coverage_lab.cli import output

    head = {
        "benchmark": name,
        "command": shlex.join(["coverage-lab", *sys.argv[1:]]),
        "machine": machine.describe(device),
        "geometry": asdict(geometry),
    }
    return output.write_records(records, json, csv, head)


def _title(what: str, geometry: Geometry) -> str:
    return (
        f"{what}: {geometry.kv_heads} KV heads of {geometry.group} query heads, D {geometry.head_dim}, "
        f"{geometry.page_size}-token pages, {geometry.dtype}"
    )
