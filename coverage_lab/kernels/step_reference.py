"""A whole decode step in plain torch, request by request; the specification of `DecodePath`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coverage_lab.kernels.cache import PagedCache
from coverage_lab.kernels.estimate.reference import (
    exact_log_mass,
    group_shares,
    mean_log_mass,
    mvar_log_mass,
    quest_log_mass,
)
from coverage_lab.kernels.lists import pack
from coverage_lab.kernels.select.reference import coverage_counts, fixed_counts, rank, take
from coverage_lab.kernels.summarize.reference import page_box, page_moments
from coverage_lab.pages import Rows

if TYPE_CHECKING:
    from coverage_lab.kernels.decode import Step


def summary_places(cache: PagedCache, request: int, pages: range) -> Tensor:
    """Return where the summaries of pages of a request lie."""
    index = torch.arange(pages.start, pages.stop, device=cache.key.device)
    return request * cache.max_pages + index if cache.table is None else cache.table[request].long()[index]


def summarize(step: Step, filled_only: bool = False) -> None:
    """Write the summaries of all full pages, or of those alone that the latest token has filled."""
    cache, summary = step.cache, step.summary
    for request in range(cache.batch):
        keys, _ = cache.tokens(request)
        count, rest = divmod(keys.shape[1], cache.page_size)
        first = max(0, count - (rest == 0)) if filled_only else 0
        if first < count:
            whole = keys[:, first * cache.page_size : count * cache.page_size].float()
            pages = whole.unflatten(1, (count - first, cache.page_size))
            halves = torch.stack((page_box if step.estimator == "quest" else page_moments)(pages), 2)
            # What float16 can't hold becomes its largest number, not infinity.
            most = torch.finfo(summary.dtype).max
            places = summary_places(cache, request, range(first, count))
            summary[places] = halves.transpose(0, 1).clamp(-most, most).to(summary)


def estimate(step: Step, query: Tensor) -> None:
    """Write the log masses, sink and current page exact, and the summary of a page that was filled."""
    cache, kind, found = step.cache, step.estimator, step.log_mass.fill_(-torch.inf)
    size = cache.page_size
    for request in range(cache.batch):
        keys, _ = cache.tokens(request)
        scaled = step.scale * query[request].float().unflatten(0, (cache.kv_heads, -1))
        last = -(-keys.shape[1] // size) - 1
        rows = found[request * cache.kv_heads : (request + 1) * cache.kv_heads]
        for page in {0, last} if last >= 0 else ():
            part = keys[:, page * size : (page + 1) * size].float()
            rows[..., page : page + 1] = exact_log_mass(scaled, part, size)
        if last > 1:
            held = step.summary[summary_places(cache, request, range(1, last))].float().transpose(0, 1)
            halves = held[:, :, 0], held[:, :, 1]
            if kind == "mean":
                rows[..., 1:last] = mean_log_mass(scaled, halves[0], size)
            else:
                rows[..., 1:last] = (mvar_log_mass if kind == "mvar" else quest_log_mass)(
                    scaled, *halves, size
                )
    summarize(step, filled_only=True)


def select(step: Step) -> None:
    """Write the lists that the budget makes of the log masses."""
    cache = step.cache
    gamma, count = (None, step.budget.long()) if step.by_count else (float(step.budget), None)
    pages, counts = chosen(step.log_mass, cache, gamma, count)
    step.pages.copy_(pages.view_as(step.pages))
    packed = pack(cache, step.pages, counts.view_as(step.lists.counts))
    step.lists.counts.copy_(packed.counts)
    step.lists.entries.copy_(packed.entries)
    seen = cache.pages_held.repeat_interleave(cache.kv_heads)
    step.reads.add_(torch.stack([counts, seen], 1))


def chosen(
    log_mass: Tensor, cache: PagedCache, gamma: float | None, count: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what a coverage or else a count, of all rows or of each, keeps, by sorting.

    `[rows, pages]` int32 lists, sink first and current page last, and `[rows]` int32 counts.
    """
    n_pages = cache.pages_held.repeat_interleave(cache.kv_heads)
    numbers = torch.arange(cache.rows, device=log_mass.device)
    rows = Rows(
        n_pages=n_pages,
        first_page=torch.zeros_like(n_pages),
        position=n_pages,
        layer=numbers * 0,
        kv_head=numbers,
        page_size=cache.page_size,
    )
    beyond = torch.arange(log_mass.shape[2], device=log_mass.device) >= n_pages[:, None]
    ranking = rank(group_shares(log_mass.masked_fill(beyond[:, None], -torch.inf)), rows)
    if count is None:
        gammas = torch.tensor([gamma], dtype=torch.float64, device=log_mass.device)
        kept = coverage_counts(ranking, gammas)[:, 0]
    else:
        kept = fixed_counts(ranking, count)
    kept = kept.where(n_pages > 0, 0)
    chosen = take(ranking, kept)
    # Pages of the list first, in their order.
    pages = (~chosen).int().sort(stable=True, dim=1).indices
    return pages.int(), kept.int()
