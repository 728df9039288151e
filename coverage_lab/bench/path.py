"""The whole path against dense attention, at given reads (paper 5.5.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from coverage_lab.bench.attend import ATTEND_DENSE, FA3_DENSE, attention_call
from coverage_lab.bench.check import attention_error
from coverage_lab.bench.layers import Layer, spread
from coverage_lab.bench.select import (
    SelectOptions,
    check_choice,
    described,
    prepared,
    stages,
)
from coverage_lab.bench.shapes import Shape
from coverage_lab.bench.timing import enough, seconds_a_call
from coverage_lab.kernels import step_reference
from coverage_lab.kernels.baselines import baselines
from coverage_lab.kernels.baselines.page_sets import every_page
from coverage_lab.kernels.decode import DecodePath
from coverage_lab.policies.estimators import estimators

# Reads of Llama-3.1-8B at gamma 0.98 (paper, Table 3), by context in tokens.
PAPER_READS = {8192: 0.42, 16384: 0.37, 32768: 0.31, 65536: 0.16, 131072: 0.15}
OTHER_READS = 0.22
SDPA = "sdpa"


def run(
    options: SelectOptions, device: torch.device, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Return a record for every shape and stage: the kernels, the path as a whole, dense attention."""
    records = []
    for place, shape in enumerate(options.shapes):
        wanted = (
            options.reads[place % len(options.reads)]
            if options.reads
            else PAPER_READS.get(shape.context, OTHER_READS)
        )
        records += _shape(options, shape, wanted, device, say)
    return records


def _shape(
    options: SelectOptions, shape: Shape, wanted: float, device: torch.device, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    say(f"{shape}: layers")
    layers, paths = prepared(options, shape, device)
    gamma = gamma_for(paths, layers, wanted)
    for path in paths:
        path.gamma = gamma
    outs = [path(layer.query).clone() for layer, path in zip(layers, paths, strict=True)]
    equal = min(check_choice(paths[at], layers[at].query) for at in (0, -1))
    errors = [
        attention_error("the path", outs[at], layers[at], paths[at].pages, paths[at].counts) for at in (0, -1)
    ]
    pages = paths[0].cache.max_pages
    kept = sum(float(path.counts.float().mean()) for path in paths) / len(paths) / pages
    if abs(kept - wanted) > 0.1 * wanted:
        say(f"{shape}: keeps {kept:.1%}, since lists of whole pages can't keep {wanted:.1%}")
    size, dim = options.geometry.page_size, options.geometry.head_dim
    metadata = estimators.get(options.estimator)().metadata_values(dim, size) / (2 * size * dim)
    base = {
        **described(options.geometry, shape),
        "gamma": gamma,
        "kept": kept,
        "reads": kept + metadata,
        "cv": spread(paths[0].counts.cpu().numpy()),
        "rows_equal": equal,
        "layers": len(layers),
        "error": max(errors),
    }
    timed = stages(layers, paths)
    del timed["sort"]
    each = list(zip(layers, paths, outs, strict=True))
    timed["attend+merge"] = [partial(path.attend, layer.query, out) for layer, path, out in each]
    timed["path"] = [partial(path, layer.query, out) for layer, path, out in each]
    lists = every_page(layers[0].cache)
    others = [name for name in (FA3_DENSE, SDPA) if baselines.get(name).missing(layers[0].cache) is None]
    for name in (ATTEND_DENSE, *others):
        dense = [attention_call(name, layer, *lists) for layer in layers]
        for at in (0, -1):
            attention_error(name, dense[at](), layers[at], *lists)
        timed[name] = list(dense)
    records = []
    for stage, calls in timed.items():
        say(f"{shape}: {stage}")
        records.append({**base, "stage": stage, "us": 1e6 * seconds_a_call(enough(calls, device), device)})
    times = {record["stage"]: record["us"] for record in records}
    dense_us = times.get(FA3_DENSE, times[ATTEND_DENSE])
    return [{**record, "dense_over": dense_us / record["us"]} for record in records]


def gamma_for(paths: Sequence[DecodePath], layers: Sequence[Layer], wanted: float) -> float:
    """Return the coverage at which paths keep this fraction of the pages, over all layers."""
    masses = [path.estimate(layer.query) for path, layer in zip(paths, layers, strict=True)]
    cache = paths[0].cache
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        kept = [step_reference.chosen(mass, cache, middle, None)[1].float().mean() for mass in masses]
        enough = float(sum(kept)) >= wanted * cache.max_pages * len(masses)
        low, high = (low, middle) if enough else (middle, high)
    return high
