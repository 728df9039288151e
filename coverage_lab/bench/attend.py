"""Attention over ragged lists: our kernel and what it is compared with (paper 5.5.3, Fig. 4, Table 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coverage_lab.bench import lengths
from coverage_lab.bench.check import attention_error
from coverage_lab.bench.layers import Layer, how_many, lists_of, make, spread
from coverage_lab.bench.shapes import Geometry, Shape
from coverage_lab.bench.timing import enough, host_seconds_a_call, seconds_a_call
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.attend import reference
from coverage_lab.kernels.baselines import Baseline, baselines
from coverage_lab.kernels.baselines.page_sets import every_page
from coverage_lab.kernels.device import backend
from coverage_lab.kernels.lists import pack
from coverage_lab.kernels.ragged import Attend

if TYPE_CHECKING:
    from coverage_lab.policies.policy import Policy
    from coverage_lab.trace import Trace

ATTEND = "attend"
ATTEND_DENSE = "attend-dense"
FA3_DENSE = "fa3-dense"


@dataclass(frozen=True, kw_only=True)
class AttendOptions:
    """What `bench attend` times.

    Attributes
    ----------
    shapes : sequence of Shape
    geometry : Geometry
    kept : float
        Fraction of all pages that the drawn lists keep.
    cvs : sequence of float
        Spreads of the drawn lists' lengths.
    trace : Trace, optional
        Whose page counts give further lists, as `policy` keeps them.
    policy : Policy, optional
    baselines : sequence of str
        Names.
    strict : bool
        Whether a baseline that fails ends the run; else it is left out.
    seed : int
    """

    shapes: Sequence[Shape]
    geometry: Geometry = field(default_factory=Geometry)
    kept: float = 0.22
    cvs: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.2)
    trace: Trace | None = None
    policy: Policy | None = None
    baselines: Sequence[str] = ()
    strict: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        lengths.check_kept(self.kept)


def run(
    options: AttendOptions, device: torch.device, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Return a record for every shape, set of lists and method; `say` is told what is under way."""
    records = []
    for shape in options.shapes:
        records += _shape(options, shape, device, say)
    return compared(records)


def _shape(
    options: AttendOptions, shape: Shape, device: torch.device, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    geometry = options.geometry
    rows, pages = geometry.rows(shape), geometry.pages(shape)
    drawn = {}
    for cv in options.cvs:
        try:
            drawn[f"{cv:g}"] = lengths.drawn(rows, pages, options.kept, cv, options.seed)
        except lengths.NoSuchLists as error:
            say(f"{shape}: left out {error}")
    if options.trace is not None and options.policy is not None:
        real = lengths.of_trace(
            options.trace, options.policy, shape.batch, geometry.kv_heads, pages, options.seed
        )
        drawn["trace"] = real.ravel()
    dense = geometry.dense_bytes(shape)
    count = how_many(max(1, int(options.kept * dense)), 2 * dense, device)
    say(f"{shape}: layers ({count}, {dense / 2**20:.1f} MiB each)")
    layers = make(shape, geometry, device, count, options.seed)
    records = []

    def record(method: str, listed: str, found: dict[str, Any], counts: np.ndarray) -> None:
        records.append(
            {
                "shape": str(shape),
                "context": shape.context,
                "batch": shape.batch,
                "rows": rows,
                "lists": listed,
                "cv": spread(counts),
                "kept": float(counts.mean() / pages),
                "method": method,
                "layers": len(layers),
                **found,
            }
        )

    def time(method: str, listed: str, lists: tuple[Tensor, Tensor], counts: np.ndarray) -> None:
        say(f"{shape}: {method}" + (f", lists {listed}" if listed != "all" else ""))
        try:
            record(method, listed, _time(method, layers, *lists, geometry), counts)
        except (CoverageLabError, RuntimeError, ValueError) as error:
            if method in (ATTEND, ATTEND_DENSE):
                raise
            reason = str(error).partition("\n")[0]
            if options.strict:
                raise CoverageLabError(f"baseline {method} at {shape}: {reason}") from error
            say(f"{shape}: left out {method} ({reason})")

    every = every_page(layers[0].cache)
    for method in [ATTEND_DENSE, *(name for name in options.baselines if baselines.get(name).dense)]:
        time(method, "all", every, np.full(rows, pages))
    for listed, counts in drawn.items():
        lists = lists_of(layers[0].cache, counts.reshape(shape.batch, -1), options.seed)
        for method in [ATTEND, *(name for name in options.baselines if not baselines.get(name).dense)]:
            time(method, listed, lists, counts)
    return records


def _time(
    method: str, layers: Sequence[Layer], pages: Tensor, counts: Tensor, geometry: Geometry
) -> dict[str, Any]:
    """Return the time of a method over the layers, and how far its result is from float32."""
    device = layers[0].query.device
    calls: list[Callable[[], Tensor]]
    plans: list[Callable[[], object]] = []
    read = pages, counts
    if method in (ATTEND, ATTEND_DENSE):
        calls = [_attend(layer, pages, counts) for layer in layers]
    else:
        made = [_baseline(method, layer, pages, counts) for layer in layers]
        read = made[0].pages, made[0].counts
        calls = [one.run for one in made]
        plans = [one.plan for one in made] if made[0].plan() else []
    error = max(
        attention_error(method, call(), layer, *read)
        for call, layer in ((calls[0], layers[0]), (calls[-1], layers[-1]))
    )
    seconds = seconds_a_call(enough(calls, device), device)
    bytes_read = int(read[1].sum()) * geometry.page_bytes()
    return {
        "us": 1e6 * seconds,
        "plan_us": 1e6 * host_seconds_a_call(plans * 3, device) if plans else None,
        "bytes": bytes_read,
        "gbps": bytes_read / seconds / 1e9,
        "error": error,
    }


def attention_call(method: str, layer: Layer, pages: Tensor, counts: Tensor) -> Callable[[], Tensor]:
    """Return a method on one layer, ready to be called."""
    if method in (ATTEND, ATTEND_DENSE):
        return _attend(layer, pages, counts)
    return _baseline(method, layer, pages, counts).run


def _baseline(method: str, layer: Layer, pages: Tensor, counts: Tensor) -> Baseline:
    return baselines.get(method)(layer.query, layer.cache, pages, counts, layer.scale)


def _attend(layer: Layer, pages: Tensor, counts: Tensor) -> Callable[[], Tensor]:
    query, cache = layer.query, layer.cache
    if backend(query.device, query.dtype) == "reference":
        return lambda: reference.attend(query, cache, pages, counts, layer.scale)
    workspace, lists, out = Attend(cache, query.shape[1]), pack(cache, pages, counts), torch.empty_like(query)
    return lambda: workspace(query, cache, lists, out)


def compared(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with what sets them in relation.

    Adds `of_dense_bandwidth`, the bandwidth over the best that a dense kernel reaches over the shapes (FA3
    where it ran, else our own); `over_floor`, the time over that of the selected bytes at this bandwidth;
    `over_attend`, the time over our kernel's on the same lists, the host's plan left out; `dense_over`, the
    time of the same dense kernel at this shape over this one's.
    """
    dense = [record for record in records if record["method"] == FA3_DENSE]
    dense = dense or [record for record in records if record["method"] == ATTEND_DENSE]
    best = max(record["gbps"] for record in dense)
    ours = {
        (record["shape"], record["lists"]): record
        for record in records
        if record["method"] in (ATTEND, ATTEND_DENSE)
    }
    by_method = [
        {r["shape"]: r["us"] for r in records if r["method"] == m} for m in (ATTEND_DENSE, FA3_DENSE)
    ]
    at_shape = by_method[0] | by_method[1]
    found = []
    for record in records:
        base = ours[record["shape"], record["lists"]]
        found.append(
            {
                **record,
                "of_dense_bandwidth": record["gbps"] / best,
                "over_floor": record["us"] * best * 1e3 / base["bytes"],
                "over_attend": record["us"] / base["us"],
                "dense_over": at_shape[record["shape"]] / record["us"],
            }
        )
    return found
