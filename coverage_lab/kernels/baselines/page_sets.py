"""What kernels without ragged lists make of them: longer lists, unions."""

from __future__ import annotations

import torch
from torch import Tensor

from coverage_lab.kernels.cache import PagedCache


def to_set(cache: PagedCache, pages: Tensor, counts: Tensor) -> Tensor:
    """Return lists as a mask, `[B, KV heads, pages]`."""
    place = torch.arange(pages.shape[2], device=pages.device)
    inside = place < counts[..., None]
    kept = torch.zeros(*counts.shape, cache.max_pages + 1, dtype=torch.bool, device=pages.device)
    # What lies beyond a list goes to a column of its own.
    kept.scatter_(2, pages.long().where(inside, cache.max_pages), True)
    return kept[..., : cache.max_pages]


def to_lists(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ascending lists of a mask and their lengths, int32."""
    pages = (~kept).int().sort(dim=-1, stable=True).indices.int()
    return pages, kept.sum(-1, dtype=torch.int32)


def every_page(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Return the lists of dense attention."""
    counts = cache.pages_held[:, None].expand(cache.batch, cache.kv_heads)
    place = torch.arange(cache.max_pages, device=counts.device)
    return to_lists(place < counts[..., None])


def extended(cache: PagedCache, pages: Tensor, counts: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists with the first pages that they lack, until they have `wanted` (or all there are)."""
    kept = to_set(cache, pages, counts)
    there = torch.arange(cache.max_pages, device=kept.device) < cache.pages_held[:, None, None]
    lacking = there & ~kept
    added = lacking & (lacking.cumsum(-1) <= (wanted - counts)[..., None])
    return to_lists(kept | added)


def power_of_two(counts: Tensor) -> Tensor:
    """Return the least power of two from each count on."""
    return (2 ** counts.clamp(min=1).log2().ceil()).to(counts.dtype)


def last_tokens(cache: PagedCache) -> Tensor:
    """Return the tokens of each request's current page, `[B]` int64."""
    return cache.tokens_held - (cache.pages_held - 1) * cache.page_size


def list_tokens(cache: PagedCache, counts: Tensor) -> Tensor:
    """Return the tokens of lists that end with the current page, int32, shaped as `counts`."""
    shape = (-1, *(1 for _ in counts.shape[1:]))
    return ((counts - 1) * cache.page_size + last_tokens(cache).view(shape)).int()


def row_places(cache: PagedCache, pages: Tensor, counts: Tensor) -> Tensor:
    """Return where the pages of each row lie if every (page, KV head) pair counts as a page of its own.

    `[rows, width]` int32; pages that no list has point at the first page of their row.
    """
    assert cache.table is not None
    inside = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    index = pages.long().where(inside, 0)
    physical = cache.table.long().gather(1, index.flatten(1)).view(index.shape)
    head = torch.arange(cache.kv_heads, device=pages.device)[:, None]
    return (physical * cache.kv_heads + head).flatten(0, 1).int()


def rows_as_pool(cache: PagedCache) -> tuple[Tensor, Tensor] | None:
    """Return keys and values as `[pages * KV heads, S, 1, D]` without a copy; None where that can't be."""
    views = []
    for tensor, strides in ((cache.key, cache.key_strides), (cache.value, cache.value_strides)):
        _, page, token, head = strides
        if cache.table is None or page != cache.kv_heads * head:
            return None
        size = (cache.physical_pages * cache.kv_heads, cache.page_size, 1, cache.head_dim)
        views.append(tensor.as_strided(size, (head, token, head, 1)))
    return views[0], views[1]


def token_major(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Return keys and values of a pool as `[pages, S, KV heads, D]` without a copy."""
    views = []
    for tensor, strides in ((cache.key, cache.key_strides), (cache.value, cache.value_strides)):
        _, page, token, head = strides
        size = (cache.physical_pages, cache.page_size, cache.kv_heads, cache.head_dim)
        views.append(tensor.as_strided(size, (page, token, head, 1)))
    return views[0], views[1]
