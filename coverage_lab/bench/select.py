"""Estimate and Select: what choosing the pages costs (paper 3.4 and Table 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from coverage_lab.bench.layers import Layer, how_many, make, spread
from coverage_lab.bench.shapes import Geometry, Shape
from coverage_lab.bench.timing import enough, seconds_a_call
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels import step_reference
from coverage_lab.kernels.baselines.page_sets import to_lists
from coverage_lab.kernels.decode import MOST_WIDTH, DecodePath, Kind

# Rows whose lists are compared with the reference, as in the paper's appendix B.
ROWS_CHECKED = 64
# Of a log mass, relative to one more than its size: half-precision summaries, float32 sums.
ESTIMATE_TOLERANCE = 5e-3


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """What `bench select` and `bench path` time.

    Attributes
    ----------
    shapes : sequence of Shape
    geometry : Geometry
    gamma : float
        Coverage; `bench path` looks for the one that keeps what `reads` says.
    reads : sequence of float
        Fraction of the pages that each shape keeps; of `bench path` alone.
    estimator : {"mvar", "mean", "quest"}
    seed : int
    """

    shapes: Sequence[Shape]
    geometry: Geometry = field(default_factory=Geometry)
    gamma: float = 0.98
    reads: Sequence[float] = ()
    estimator: Kind = "mvar"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise CoverageLabError(f"--gamma {self.gamma:g} is not in (0, 1]")
        for read in self.reads:
            if not 0 < read <= 1:
                raise CoverageLabError(f"--reads {read:g} is not in (0, 1]")
        if self.estimator not in get_args(Kind):
            raise CoverageLabError(f"--estimator {self.estimator} is not one of {', '.join(get_args(Kind))}")
        for shape in self.shapes:
            pages = self.geometry.pages(shape)
            if pages > MOST_WIDTH:
                raise CoverageLabError(f"shape {shape} has {pages} pages; at most {MOST_WIDTH} are possible")


def run(
    options: SelectOptions, device: torch.device, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Return a record for every shape and stage: estimate, select, both, and a rule that sorts."""
    records = []
    for shape in options.shapes:
        say(f"{shape}: layers")
        layers, paths = prepared(options, shape, device)
        equal = min(check_choice(paths[at], layers[at].query) for at in (0, -1))
        check_sorted(paths[0])
        counts = paths[0].counts
        base = {
            **described(options.geometry, shape),
            "gamma": options.gamma,
            "kept": float(counts.float().mean()) / paths[0].cache.max_pages,
            "cv": spread(counts.cpu().numpy()),
            "rows_equal": equal,
            "layers": len(layers),
        }
        for stage, call in stages(layers, paths).items():
            say(f"{shape}: {stage}")
            us = 1e6 * seconds_a_call(enough(call, device), device)
            records.append({**base, "stage": stage, "us": us})
    return records


def described(geometry: Geometry, shape: Shape) -> dict[str, Any]:
    """Return what names a shape in a record."""
    return {
        "shape": str(shape),
        "context": shape.context,
        "batch": shape.batch,
        "rows": geometry.rows(shape),
        "pages": geometry.pages(shape),
    }


def prepared(
    options: SelectOptions, shape: Shape, device: torch.device
) -> tuple[list[Layer], list[DecodePath]]:
    """Return layers whose pages are summarized, with a path for each that has run once."""
    geometry = options.geometry
    dense = geometry.dense_bytes(shape)
    # Estimate reads the summaries: the bytes of two tokens a page.
    # A dense baseline may hold the keys and values once more.
    count = how_many(dense // geometry.page_size, int(2.2 * dense), device)
    layers = make(shape, geometry, device, count, options.seed)
    heads = geometry.kv_heads * geometry.group
    paths = [
        DecodePath(layer.cache, heads, gamma=options.gamma, estimator=options.estimator, scale=layer.scale)
        for layer in layers
    ]
    for layer, path in zip(layers, paths, strict=True):
        path.summarize()
        path(layer.query)
    return layers, paths


def stages(layers: Sequence[Layer], paths: Sequence[DecodePath]) -> dict[str, list[Callable[[], object]]]:
    """Return the calls of every stage, one a layer."""
    pairs = list(zip(layers, paths, strict=True))
    return {
        "estimate": [partial(path.estimate, layer.query) for layer, path in pairs],
        "select": [path.select for path in paths],
        "estimate+select": [partial(_choose, path, layer.query) for layer, path in pairs],
        "sort": [partial(sorted_lists, path.log_mass, path.gamma or 1.0) for path in paths],
    }


def _choose(path: DecodePath, query: Tensor) -> None:
    path.estimate(query)
    path.select()


def sorted_lists(log_mass: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return page lists and counts by sorting, in plain torch: what Select stands in for (appendix A).

    `log_mass` is `[rows, G, pages]`, the rows of one length.
    """
    shares = log_mass.softmax(-1).mean(1)
    # The sink and the current page come first, whatever their shares.
    ranked = shares.clone()
    for forced in (0, -1):
        ranked[:, forced] += 2
    order = ranked.argsort(-1, descending=True)
    mass = shares.gather(-1, order)
    kept = mass.cumsum(-1) - mass < gamma
    kept[:, :2] = True
    return to_lists(torch.zeros_like(kept).scatter(1, order, kept))


def check_choice(path: DecodePath, query: Tensor) -> int:
    """Compare estimates and lists with the references; return how many lists were compared, all equal.

    Raises
    ------
    CoverageLabError
        If an estimate is off by more than rounding, or a list differs from what the float32 reference of the
        rule makes of the estimates.
    """
    log_mass = path.estimate(query)
    worst = path.estimate_error(query)
    if worst > ESTIMATE_TOLERANCE:
        raise CoverageLabError(
            f"estimate is wrong: a relative error of {worst:.2g} where rounding makes "
            f"{ESTIMATE_TOLERANCE:g} at most"
        )
    path.select()
    pages, counts = step_reference.chosen(log_mass, path.cache, path.gamma, path.count)
    rows = min(ROWS_CHECKED, path.cache.rows)
    place = torch.arange(pages.shape[1], device=pages.device)
    same = (path.pages.flatten(0, 1) == pages) | (place >= counts[:, None])
    equal = int((same.all(1) & (path.counts.flatten() == counts))[:rows].sum())
    if equal != rows:
        raise CoverageLabError(f"select is wrong: {equal} of {rows} lists equal the reference")
    return equal


def check_sorted(path: DecodePath) -> None:
    """Raise CoverageLabError if the rule that sorts keeps other counts than Select, but for rounding."""
    found = sorted_lists(path.log_mass, path.gamma or 1.0)[1]
    off = int((found - path.counts.flatten()).abs().max())
    if off > 1:
        raise CoverageLabError(f"sort is wrong: a list is {off} pages off")
