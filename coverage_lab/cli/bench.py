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
        help="Tokens of context x requests, comma-separated; k is 1,024 (131k: 131,072).",
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
Seed = Annotated[int, typer.Option(max=2**63 - 1, min=0, help="Seed of keys, values, queries and lists.")]


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
    from coverage_lab.bench.timing import has_graphs
    from coverage_lab.cli import output
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.trace import Trace

    output.check_outputs(json, csv, figure=figure)
    place, shape_list, geometry, notices = _set_up(
        shapes, device, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    others, left_out = _baselines(baselines, place, geometry)
    options = bench.AttendOptions(
        shapes=shape_list,
        geometry=geometry,
        kept=kept,
        cvs=numbers(cv, "--cv"),
        trace=Trace(trace) if trace else None,
        policy=parse_policy(policy),
        baselines=others,
        strict=baselines is not None,
        seed=seed,
    )
    notices += [f"left out: {name} ({reason})" for name, reason in left_out.items()]
    records = _run(lambda say: bench.run(options, place, say), quiet, notices)
    if not _write(records, "attend", geometry, place, json, csv, left_out=left_out):
        columns = [
            "shape", "lists", "CV", "kept", "method", "us", "host\nplan us", "GB/s", "of dense\nbandwidth",
            "over\nfloor", "over\nattend", "dense\nover it",
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
                output.number(line["dense_over"], 2),
            ]
            for line in records
        ]
        screen = output.console()
        droppable = ["of dense\nbandwidth", "GB/s", "over\nfloor", "kept", "host\nplan us"]
        title = _title("Attention, one layer", geometry, place)
        output.print_table(screen, title, columns, rows, droppable)
        if not quiet:
            how = (
                "median over CUDA graph replays, level-2 cache cold"
                if has_graphs(place)
                else "by the clock, since no graph can be captured"
            )
            screen.print(
                f"us: {how}; results checked against float32. Floor: the selected bytes at the best "
                "bandwidth of dense FA3 over the shapes, or of our own dense attention without it.",
                highlight=False,
                soft_wrap=True,
            )
    if figure:
        title = _title("Attention, one layer", geometry, place)
        output.save_figure(attend_time.figure(attend_time.to_frame(records), title), figure)


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
    from coverage_lab.errors import CoverageLabError

    output.check_outputs(json, csv)
    place, shape_list, geometry, notices = _set_up(
        shapes, device, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    options = SelectOptions(
        shapes=shape_list,
        geometry=geometry,
        reads=numbers(reads, "--reads") if reads else (),
        estimator=estimator,  # type: ignore[arg-type]
        seed=seed,
    )
    if len(options.reads) not in (0, 1, len(shape_list)):
        raise CoverageLabError(f"--reads {reads}: give one, or one for each of the {len(shape_list)} shapes")
    records = _run(lambda say: bench.run(options, place, say), quiet, notices)
    if not _write(records, "path", geometry, place, json, csv):
        found = list(dict.fromkeys(line["shape"] for line in records))
        stages = list(dict.fromkeys(line["stage"] for line in records))
        of = {(line["shape"], line["stage"]): line for line in records}
        whole = [of[shape, "path"] for shape in found]
        rows = [
            ["kept", *(output.percent(line["kept"]) for line in whole)],
            ["CV of list lengths", *(output.number(line["cv"], 2) for line in whole)],
            ["gamma", *(output.number(line["gamma"], 4) for line in whole)],
            *(
                [f"{stage}, us", *(output.number(of[shape, stage]["us"], 1) for shape in found)]
                for stage in stages
            ),
            ["dense over path", *(output.number(line["dense_over"], 2) for line in whole)],
        ]
        title = _title("Decode path, one layer", geometry, place)
        output.print_table(output.console(), title, ["", *found], rows)


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
    place, shape_list, geometry, notices = _set_up(
        shapes, device, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    options = bench.SelectOptions(
        shapes=shape_list,
        geometry=geometry,
        gamma=gamma,
        estimator=estimator,  # type: ignore[arg-type]
        seed=seed,
    )
    records = _run(lambda say: bench.run(options, place, say), quiet, notices)
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
        output.print_table(output.console(), _title("Selection, one layer", geometry, place), columns, rows)


def _set_up(
    shapes: str | None, device: str | None, **geometry: Any
) -> tuple[torch.device, list[Shape], Geometry, list[str]]:
    """Return the device, shapes and geometry that options name, and what is to be said of them."""
    import torch

    from coverage_lab.bench.shapes import DTYPES, Geometry, Shape
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
        name, _, fault = str(error).partition(": ")
        raise CoverageLabError(f"--{name.replace('_', '-')}: {fault}") from None
    default = GPU_SHAPES if place.type == "cuda" else CPU_SHAPES
    found = list(dict.fromkeys(Shape.parse(text) for text in names(default if shapes is None else shapes)))
    if not found:
        raise CoverageLabError(f"--shapes {shapes!r} names no shape; try {CPU_SHAPES}")
    for shape in found:
        if layer.rows(shape) > MOST_ROWS:
            raise CoverageLabError(
                f"shape {shape} has {layer.rows(shape)} rows (requests x KV heads); "
                f"at most {MOST_ROWS} are possible"
            )
    runs, notices = backend(place, DTYPES[layer.dtype]), []
    if place.type == "cpu":
        what = "plain torch" if runs == "reference" else "Triton's interpreter"
        notices = [f"no GPU: {what} is timed, which says nothing about the kernels"]
    elif runs == "reference":
        notices = ["this GPU has no bf16: plain torch is timed in place of the kernels"]
    return place, found, layer, notices


def _baselines(
    text: str | None, device: torch.device, geometry: Geometry
) -> tuple[list[str], dict[str, str]]:
    """Return the baselines that can run, and why the others can't."""
    from coverage_lab.bench.layers import make
    from coverage_lab.bench.shapes import Shape
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.kernels.baselines import baselines

    if text == "none":
        return [], {}
    cache = make(Shape(geometry.page_size, 1), geometry, device, 1, 0)[0].cache
    found, left_out = [], {}
    for name in dict.fromkeys(names(text)) or baselines.names():
        reason = baselines.get(name).missing(cache)
        if reason is None:
            found.append(name)
        elif names(text):
            raise CoverageLabError(f"baseline {name}: {reason}")
        else:
            left_out[name] = reason
    return found, left_out


def _run(
    work: Callable[[Callable[[str], None]], list[dict[str, Any]]], quiet: bool, notices: Sequence[str]
) -> list[dict[str, Any]]:
    """Run a benchmark, saying on standard error what is to be known and what is under way."""
    from rich.console import Console

    if quiet:
        return work(lambda line: None)
    for notice in notices:
        print(notice, file=sys.stderr, flush=True)
    console = Console(stderr=True)
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
    **more: Any,
) -> bool:
    """Write records where asked, the JSON with the machine; True if they went to standard output."""
    from dataclasses import asdict

    from coverage_lab.bench import machine
    from coverage_lab.bench.shapes import DTYPES
    from coverage_lab.cli import output
    from coverage_lab.kernels.device import backend

    head = {
        "benchmark": name,
        "command": shlex.join(["coverage-lab", *sys.argv[1:]]),
        "machine": machine.describe(device),
        "backend": backend(device, DTYPES[geometry.dtype]),
        "geometry": asdict(geometry),
        **more,
    }
    return output.write_records(
        [{**record, "backend": head["backend"]} for record in records], json, csv, head
    )


def _title(what: str, geometry: Geometry, device: torch.device) -> str:
    """Return what was timed; where it was not the kernels on a GPU, it says so."""
    from coverage_lab.bench.shapes import DTYPES
    from coverage_lab.kernels.device import backend

    runs = ""
    if backend(device, DTYPES[geometry.dtype]) == "reference":
        runs = " (plain torch, not the kernels)"
    elif device.type == "cpu":
        runs = " (Triton's interpreter)"
    return (
        f"{what}{runs}: {geometry.kv_heads} KV heads, {geometry.group} query heads each, "
        f"D {geometry.head_dim}, {geometry.page_size}-token pages, {geometry.dtype}"
    )
