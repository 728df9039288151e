"""Page lists as the attention kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coverage_lab.kernels.cache import PagedCache

# An entry is 256 times the physical page plus the tokens that the page holds, in an int32.
MOST_PAGES = 1 << 23


@dataclass(frozen=True)
class PageLists:
    """Pages that every row reads.

    Attributes
    ----------
    entries : Tensor
        `[B, KV heads, width]` int32: physical page times 256, plus its tokens; past the row's count anything.
    counts : Tensor
        `[B, KV heads]` int32, at least 1: a row without pages has one entry without tokens.
    page_size : int
        Tokens a page.
    """

    entries: Tensor
    counts: Tensor
    page_size: int


def pack(cache: PagedCache, pages: Tensor, counts: Tensor) -> PageLists:
    """Return the lists of any selector in the form that the kernel reads, without asking the host.

    Parameters
    ----------
    cache : PagedCache
    pages : Tensor
        `[B, KV heads, width]` integers: pages by their place in the request, each at most once. What lies
        beyond a row's count is not looked at, and pages that the request does not have hold no tokens.
    counts : Tensor
        `[B, KV heads]` integers, of 0 to `width`; others count as the nearer of the two.
    """
    check_lists(cache, pages, counts)
    wanted = pages.long()
    index = wanted.clamp(0, cache.max_pages - 1)
    tokens = (cache.tokens_held[:, None, None] - index * cache.page_size).clamp(0, cache.page_size)
    tokens = tokens.where(index == wanted, 0)
    if cache.table is not None:
        index = cache.table.long().gather(1, index.flatten(1)).view(index.shape)
    place = torch.arange(pages.shape[2], device=pages.device)
    entries = (index * 256 + tokens).where(place < counts[..., None], 0)
    kept = counts.int().clamp(1, pages.shape[2])
    return PageLists(entries.int().contiguous(), kept.contiguous(), cache.page_size)


def check_packed(cache: PagedCache, lists: PageLists) -> None:
    """Raise ValueError if packed lists do not go with a cache, or not as the kernel reads them."""
    rows, page_size = (cache.batch, cache.kv_heads), cache.page_size
    if lists.page_size != page_size:
        raise ValueError(f"lists: packed for pages of {lists.page_size} tokens, the cache has {page_size}")
    if lists.entries.ndim != 3 or lists.entries.shape[:2] != rows or lists.counts.shape != rows:
        raise ValueError(
            f"lists: entries {tuple(lists.entries.shape)} and counts {tuple(lists.counts.shape)} are not of "
            f"{rows[0]} requests with {rows[1]} KV heads"
        )
    for tensor in (lists.entries, lists.counts):
        if tensor.dtype != torch.int32 or tensor.device != cache.key.device or not tensor.is_contiguous():
            raise ValueError("lists: must be contiguous int32 tensors on the device of the keys; use pack")


def check_lists(cache: PagedCache, pages: Tensor, counts: Tensor) -> None:
    """Raise ValueError if lists do not go with a cache."""
    rows = (cache.batch, cache.kv_heads)
    for name, tensor in (("pages", pages), ("counts", counts)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: must be a tensor, not {type(tensor).__name__}")
    if pages.ndim != 3 or pages.shape[:2] != rows or pages.shape[2] < 1:
        raise ValueError(f"pages: must be [{rows[0]}, {rows[1]}, width], not {tuple(pages.shape)}")
    if counts.shape != rows:
        raise ValueError(f"counts: must be [{rows[0]}, {rows[1]}], not {tuple(counts.shape)}")
    for name, tensor in (("pages", pages), ("counts", counts)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: must hold integers, not {tensor.dtype}")
        if tensor.device != cache.key.device:
            raise ValueError(f"{name}: lies on {tensor.device}, the keys on {cache.key.device}")
