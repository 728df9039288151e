"""The kernels of a decode step, launched; nothing waits for the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from coverage_lab.kernels.device import power_of_two

if TYPE_CHECKING:
    from coverage_lab.kernels.decode import Step

# Pages whose summaries a block of Estimate reads at once, and how many such reads are under way.
ESTIMATE_PAGES = 32
ESTIMATE_STAGES = 3
# Thresholds a pass of Select, and warps a block, by pages of a row: measured on an H200.
SELECT_SIZES = ((512, 8, 4), (1024, 4, 4), (4096, 4, 8), (1 << 30, 2, 16))

# Rows of so many pages are read to their capacity, before their length is known: one wait instead of two.
MOST_EAGER = 2048


def summarize(step: Step) -> None:
    """Write the summaries of all full pages."""
    from coverage_lab.kernels.summarize.triton import summarize_kernel

    cache, table = step.cache, step.table
    summarize_kernel[(cache.rows, cache.max_pages)](
        cache.key,
        cache.lengths,
        cache.max_tokens,
        table,
        step.summary,
        *cache.key_strides,
        table.stride(0),
        cache.max_pages,
        cache.kv_heads,
        DIM=cache.head_dim,
        DIM_TILE=power_of_two(cache.head_dim),
        PAGE=cache.page_size,
        HAS_TABLE=cache.table is not None,
        KIND=step.estimator,
    )


def estimate(step: Step, query: Tensor) -> None:
    """Write the log masses, and the summary of the page that the step has filled."""
    from coverage_lab.kernels.estimate.triton import estimate_kernel

    cache, table = step.cache, step.table
    tiles = -(-cache.max_pages // ESTIMATE_PAGES)
    parts = min(tiles, max(1, round(step.estimate_blocks / cache.rows)))
    estimate_kernel[(cache.rows, parts + 2)](
        query,
        cache.key,
        cache.lengths,
        cache.max_tokens,
        table,
        step.summary,
        step.log_mass,
        step.scale,
        query.stride(0),
        query.stride(1),
        *cache.key_strides,
        table.stride(0),
        cache.max_pages,
        cache.kv_heads,
        step.log_mass.stride(0),
        step.log_mass.stride(1),
        GROUP=step.group,
        GROUP_TILE=16,
        DIM=cache.head_dim,
        DIM_TILE=power_of_two(cache.head_dim),
        PAGE=cache.page_size,
        LOG_PAGE=math.log(cache.page_size),
        PAGES_TILE=ESTIMATE_PAGES,
        STAGES=ESTIMATE_STAGES,
        HAS_TABLE=cache.table is not None,
        KIND=step.estimator,
    )


def select(step: Step) -> None:
    """Write the lists that the budget makes of the log masses."""
    from coverage_lab.kernels.select.triton import select_kernel

    cache, table = step.cache, step.table
    width = power_of_two(cache.max_pages)
    thresholds, warps = next(pair for most, *pair in SELECT_SIZES if width <= most)
    select_kernel[(cache.rows,)](
        step.log_mass,
        cache.lengths,
        cache.max_tokens,
        table,
        step.budget,
        step.lists.entries,
        step.pages,
        step.lists.counts,
        step.reads,
        int(len(step.budget) > 1),
        table.stride(0),
        cache.kv_heads,
        step.log_mass.stride(0),
        step.log_mass.stride(1),
        cache.max_pages,
        GROUP=step.group,
        PAGE=cache.page_size,
        WIDTH=width,
        HEADS_TILE=min(power_of_two(step.group), max(1, 16_384 // width)),
        THRESHOLDS=thresholds,
        BY_COUNT=step.by_count,
        HAS_TABLE=cache.table is not None,
        EAGER=width <= MOST_EAGER,
        num_warps=warps,
    )
