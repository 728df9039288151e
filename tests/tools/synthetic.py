"""Traces made of numbers alone, for tests and benchmarks.

Shares look like those of a model: a sink, a recent past, a few large pages, heads and layers that differ in
how much they need, needs that drift from step to step, and estimates that are noisy versions of the truth.

    python tests/tools/synthetic.py OUT --rows 2000000 --pages 100 --estimators exact,mvar
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from coverage_lab.pages import page_range
from coverage_lab.trace.schema import ROUNDING, oracle_column, share_column
from coverage_lab.trace.writer import TraceWriter

# Standard deviation of an estimate's log mass; a name that is not here gets the last.
NOISE = {"mvar": 0.4, "quest": 0.8, "mean": 1.2}
OTHER_NOISE = 0.6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a synthetic trace looks like.

    Parameters
    ----------
    requests, layers, kv_heads, group : int
        `group` is the query heads a KV head.
    steps : int or tuple of int
        Decode steps a request; a list gives each request its own, in turn.
    pages : tuple of int
        Least and most pages of a row (more where the steps alone need them). Prompt lengths are drawn.
    page_size, head_dim : int
    estimators : tuple of str
        `exact` first.
    gammas : tuple of float
    record : {"shares", "counts", "query-heads"}
    share_dtype : {"float16", "float32"}
    windows : mapping of int to int
        Sliding window in tokens of the layers that have one.
    seed : int
    """

    requests: int = 4
    layers: int = 3
    kv_heads: int = 2
    group: int = 2
    steps: int | Sequence[int] = 8
    pages: tuple[int, int] = (3, 12)
    page_size: int = 16
    head_dim: int = 32
    estimators: tuple[str, ...] = ("exact", "mvar")
    gammas: tuple[float, ...] = (0.9, 0.95, 0.98, 0.99)
    record: str = "shares"
    share_dtype: str = "float16"
    windows: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0

    def steps_of(self, request: int) -> int:
        """Return the decode steps of a request."""
        return self.steps if isinstance(self.steps, int) else self.steps[request % len(self.steps)]


def write(path: Path, shape: Shape, only: Sequence[int] | None = None) -> Path:
    """Write a trace of a shape, request by request, and return its directory.

    `only` picks some of the requests, in an order of its own; each stays what it is in the whole trace.
    """
    with TraceWriter(path, run_of(shape)) as writer:
        if not writer.finished:
            names = []
            for request in range(shape.requests) if only is None else only:
                name, prompt_tokens, rows = draw_request(shape, request)
                writer.write(request_line(name, prompt_tokens, shape.steps_of(request)), rows)
                names.append(name)
            writer.finish(names, facts_of(shape))
    return path


def write_shares(
    path: Path,
    requests: Sequence[Mapping[str, Any]],
    *,
    prompt_tokens: int | Sequence[int],
    page_size: int = 4,
    head_dim: int = 32,
    group: int = 1,
    share_dtype: str = "float32",
    gammas: tuple[float, ...] = (0.95,),
) -> Path:
    """Write a trace of given shares.

    Parameters
    ----------
    path : Path
    requests : sequence of mapping
        For every request its list columns by name (`share`, `share_mvar`, `share_q0`, ...), each nested as
        `[layer][KV head][step][page]`. The shares need not sum to one.
    prompt_tokens : int or sequence of int
        Of every request: step t has `(prompt_tokens + t) // page_size + 1` pages.
    """
    lengths = [prompt_tokens] * len(requests) if isinstance(prompt_tokens, int) else prompt_tokens
    columns = list(requests[0])
    exact = requests[0]["share"]
    shape = Shape(
        requests=len(requests),
        layers=len(exact),
        kv_heads=len(exact[0]),
        group=group,
        steps=[len(request["share"][0][0]) for request in requests],
        page_size=page_size,
        head_dim=head_dim,
        estimators=(
            "exact",
            *(c.removeprefix("share_") for c in columns if "_q" not in c and c != "share"),
        ),
        gammas=gammas,
        record="query-heads" if any("_q" in c for c in columns) else "shares",
        share_dtype=share_dtype,
    )
    with TraceWriter(path, run_of(shape)) as writer:
        for request, (lists, tokens) in enumerate(zip(requests, lengths, strict=True)):
            geometry = _geometry(shape, shape.steps_of(request), tokens)
            width = max(len(row) for layer in lists["share"] for head in layer for row in head)
            padded = {
                name: np.array(
                    [
                        [*row, *[0.0] * (width - len(row))]
                        for layer in nested
                        for head in layer
                        for row in head
                    ],
                    np.float32,
                )
                for name, nested in lists.items()
            }
            name = f"made-{request:05d}"
            rows = _frame(shape, name, geometry, padded, np.zeros(len(geometry["layer"]), np.float32))
            writer.write(
                request_line(name, tokens, shape.steps_of(request)),
                rows,
            )
        writer.finish([f"made-{request:05d}" for request in range(len(requests))], facts_of(shape))
    return path


def draw_request(shape: Shape, request: int) -> tuple[str, int, pl.DataFrame]:
    """Return the name, the prompt's tokens and the rows of one request; it does not depend on the others."""
    generator = np.random.default_rng((shape.seed, request))
    steps = shape.steps_of(request)
    fewest, most = shape.pages
    lowest = (fewest - 1) * shape.page_size
    prompt_tokens = int(generator.integers(lowest, max(lowest, most * shape.page_size - steps) + 1))
    geometry = _geometry(shape, steps, prompt_tokens)
    log_mass = _log_masses(generator, shape, request, geometry)
    per_head = {name: _softmax(mass) for name, mass in log_mass.items()}  # [rows, heads, width]
    columns = {share_column(name): shares.mean(1) for name, shares in per_head.items()}
    if shape.record == "query-heads":
        for head in range(shape.group):
            columns |= {share_column(name, head): shares[:, head] for name, shares in per_head.items()}
    exact = log_mass["exact"]
    top = exact.max(-1)
    totals = (top + np.log(np.exp(exact - top[..., None]).sum(-1))).mean(1)
    name = f"synthetic-{request:05d}"
    return name, prompt_tokens, _frame(shape, name, geometry, columns, totals)


def _geometry(shape: Shape, steps: int, prompt_tokens: int) -> dict[str, np.ndarray]:
    """Integer columns of all rows of a request, sorted by layer, KV head and step."""
    layer, head, step = (
        axis.ravel() for axis in np.indices((shape.layers, shape.kv_heads, steps), dtype=np.int64)
    )
    ranges = np.array(
        [
            [page_range(prompt_tokens + t, shape.page_size, shape.windows.get(place)) for t in range(steps)]
            for place in range(shape.layers)
        ]
    )
    return {
        "layer": layer,
        "kv_head": head,
        "step": step,
        "position": prompt_tokens + step,
        "n_pages": ranges[layer, step, 1],
        "first_page": ranges[layer, step, 0],
    }


def _log_masses(
    generator: np.random.Generator, shape: Shape, request: int, geometry: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Log masses `[rows, query heads, width]` by estimator; -inf beyond the row.

    Unless query heads are recorded, one head stands for the mean over the group.
    """
    heads = shape.group if shape.record == "query-heads" else 1
    grid = shape.layers, shape.kv_heads, shape.steps_of(request), heads
    n_pages, first = geometry["n_pages"].reshape(grid[:3]), geometry["first_page"].reshape(grid[:3])
    width = int(n_pages.max())
    column = np.arange(width)
    # How peaked a head is belongs to the model, not to the request.
    model = np.random.default_rng((shape.seed, 1 << 20))
    peak = model.lognormal(0.9, 0.5, grid[:2])
    peak[0] *= 0.25  # the first layer looks at everything
    peak = (peak * generator.lognormal(0, 0.15))[..., None]
    peak = (peak * generator.lognormal(0, 0.35, grid[:3])).astype(np.float32)  # [layers, KV heads, steps]

    lasting = generator.standard_normal((*grid[:2], 1, 1, width), np.float32)
    mass = generator.standard_normal((*grid, width), np.float32)
    mass *= 0.7
    mass += 0.7 * lasting
    mass *= peak[..., None, None]
    age = (n_pages[..., None] - 1 - column).astype(np.float32)
    mass += (1.5 * np.exp(-np.maximum(age, 0) / 2))[:, :, :, None, :]
    mass[..., 0] += np.where(first == 0, 2 * peak, 0)[..., None]
    beyond = np.broadcast_to((column >= n_pages[..., None])[..., None, :], mass.shape)
    mass[beyond] = -np.inf
    masses = {"exact": mass}
    current = np.broadcast_to((column == n_pages[..., None] - 1)[..., None, :], mass.shape)
    for name in shape.estimators[1:]:
        noise = generator.standard_normal(mass.shape, np.float32)
        noise *= NOISE.get(name, OTHER_NOISE)
        noise[..., 0][np.broadcast_to((first == 0)[..., None], grid)] = 0
        noise[current] = 0
        noise += mass
        masses[name] = noise
    return {name: mass.reshape(-1, heads, width) for name, mass in masses.items()}


def _softmax(log_mass: np.ndarray) -> np.ndarray:
    shares = np.exp(log_mass - log_mass.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return shares


def _frame(
    shape: Shape,
    name: str,
    geometry: Mapping[str, np.ndarray],
    shares: Mapping[str, np.ndarray],
    log_total: np.ndarray,
) -> pl.DataFrame:
    exact = shares["share"]
    falling = -np.sort(-exact, axis=1)
    covered = falling.cumsum(1, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(exact > 0, exact * np.log(exact), 0).sum(1)
    types = {"layer": pl.UInt16, "kv_head": pl.UInt16}
    columns = {key: pl.Series(value, dtype=types.get(key, pl.UInt32)) for key, value in geometry.items()}
    columns["log_total"] = pl.Series(log_total, dtype=pl.Float32)
    columns["entropy"] = pl.Series(entropy, dtype=pl.Float32)
    for gamma in shape.gammas:
        counts = (covered < gamma * covered[:, -1:] - 1e-9).sum(1) + 1
        counts = np.minimum(counts, geometry["n_pages"]) if gamma < 1 else geometry["n_pages"]
        columns[oracle_column(gamma)] = pl.Series(counts, dtype=pl.UInt32)
    if shape.record != "counts":
        for key, value in shares.items():
            array = np.ascontiguousarray(value.astype(shape.share_dtype))
            columns[key] = pl.Series(array).arr.to_list()
    return pl.DataFrame(columns).select(
        pl.lit(name).alias("request_id"),
        pl.col("*").exclude(pl.List),
        pl.col(pl.List).list.head("n_pages"),
    )


def request_line(name: str, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Return the line of the requests table."""
    return {
        "request_id": name,
        "dataset": "synthetic",
        "task": name.rpartition("-")[0],
        "prompt_tokens": prompt_tokens,
        "dropped_tokens": 0,
        "steps": steps,
        "decode_start": prompt_tokens,
        "stop": "length",
        "status": "ok",
        "error": None,
        "answers": [],
        "prompt_ids": [],
        "decoded_ids": [],
    }


def run_of(shape: Shape) -> dict[str, Any]:
    """Return what the manifest says of the run."""
    return {
        "dataset": {"name": "synthetic"},
        "model": {"model": "synthetic", "device": "cpu", "dtype": "float32"},
        "page_size": shape.page_size,
        "estimators": list(shape.estimators),
        "gammas": list(shape.gammas),
        "record": shape.record,
        "share_dtype": shape.share_dtype,
        "seed": shape.seed,
        "shape": {key: value for key, value in vars(shape).items() if key != "windows"},
        "windows": {str(layer): window for layer, window in shape.windows.items()},
    }


def facts_of(shape: Shape) -> dict[str, Any]:
    """Return what the manifest says beside the run."""
    heads = {"query_heads": shape.kv_heads * shape.group, "kv_heads": shape.kv_heads}
    layers = [
        {
            "layer": layer,
            "kind": "sliding_attention" if layer in shape.windows else "full_attention",
            **heads,
            "head_dim": shape.head_dim,
            "scaling": shape.head_dim**-0.5,
            "window": shape.windows.get(layer),
            "softcap": None,
            "sinks": False,
        }
        for layer in range(shape.layers)
    ]
    return {
        "geometry": {**heads, "head_dim": shape.head_dim, "layers": layers, "skipped_layers": []},
        "share_rounding": 0.0 if shape.record == "counts" else ROUNDING[shape.share_dtype],
        "shares": "softmax of the log masses over the row's pages per query head, mean over the group",
        "learned_sinks_in_shares": False,
    }


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(arguments: Iterable[str] | None = None) -> None:
    """Write a trace of about a number of rows."""
    parser = argparse.ArgumentParser(description="Write a synthetic trace.")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--rows", type=int, default=200_000, help="rounded up to whole requests")
    parser.add_argument("--pages", type=int, default=100, help="pages a row")
    parser.add_argument("--fewest-pages", type=int, help="draw from a range up to --pages instead")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--estimators", type=_names, default=("exact", "mvar"))
    parser.add_argument("--record", default="shares", choices=("shares", "counts", "query-heads"))
    parser.add_argument("--share-dtype", default="float16", choices=tuple(ROUNDING))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(None if arguments is None else list(arguments))
    per_request = given.layers * given.kv_heads * given.steps
    shape = Shape(
        requests=-(-given.rows // per_request),
        layers=given.layers,
        kv_heads=given.kv_heads,
        group=given.group,
        steps=given.steps,
        pages=(given.fewest_pages or given.pages, given.pages),
        page_size=given.page_size,
        head_dim=given.head_dim,
        estimators=("exact", *(name for name in given.estimators if name != "exact")),
        record=given.record,
        share_dtype=given.share_dtype,
        seed=given.seed,
    )
    start = time.perf_counter()
    write(given.out, shape)
    print(f"{given.out}: {shape.requests * per_request:,} rows, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
