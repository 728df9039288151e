"""Attention over ragged page lists (paper 3.3 and 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coverage_lab.kernels.attend import reference
from coverage_lab.kernels.cache import PagedCache, check_kernel, check_out, check_query, check_scale
from coverage_lab.kernels.device import backend, can_overlap, power_of_two
from coverage_lab.kernels.lists import MOST_PAGES, PageLists, check_lists, check_packed, pack

# Pages a block of Attend reads at least.
LEAST_PAGES = 4
# Two blocks of Attend fit on a multiprocessor with their pipelines.
BLOCKS_PER_MULTIPROCESSOR = 2
MOST_ROWS = 4096


class Attend:
    """Attention over page lists, with everything it writes allocated once.

    Parameters
    ----------
    cache : PagedCache
        Its rows, head dimension, page size, dtype and device are those of every later call.
    query_heads : int
    scale : float, optional
        Softmax scale; `1 / sqrt(D)` by default.
    blocks : int, optional
        Thread blocks; two a multiprocessor by default.

    Raises
    ------
    ValueError
        For what the kernel can't take, before any launch; the message begins with the argument's name.
    """

    def __init__(
        self, cache: PagedCache, query_heads: int, scale: float | None = None, blocks: int | None = None
    ) -> None:
        device = cache.key.device
        self.group = check_kernel(cache, query_heads)
        if cache.rows > MOST_ROWS:
            raise ValueError(
                f"lengths: {cache.rows} rows (requests x KV heads); at most {MOST_ROWS} are possible"
            )
        if cache.physical_pages > MOST_PAGES:
            raise ValueError(f"key: {cache.physical_pages} pages; at most {MOST_PAGES} can be addressed")
        if blocks is not None and (type(blocks) is not int or blocks < 1):
            raise ValueError(f"blocks: {blocks!r} is no whole number from one on")
        self.scale = check_scale(scale, cache.head_dim)
        self._shape = _shape(cache)
        if blocks is None:
            blocks = 8
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                blocks = BLOCKS_PER_MULTIPROCESSOR * processors
        self.blocks = blocks
        # The dtype is said, since a framework may have set another default.
        shape = 2 * blocks, self.group
        self._parts = torch.empty(*shape, cache.head_dim, dtype=torch.float32, device=device)
        self._log_sums = torch.empty(shape, dtype=torch.float32, device=device)
        self._first_page = torch.empty(cache.rows, dtype=torch.int32, device=device)
        self._share = torch.empty(1, dtype=torch.int32, device=device)

    def __call__(
        self, query: Tensor, cache: PagedCache, lists: PageLists, out: Tensor | None = None
    ) -> Tensor:
        """Return `[B, query heads, D]`; nothing waits for the device.

        Parameters
        ----------
        query : Tensor
            `[B, query heads, D]`, not scaled.
        cache : PagedCache
        lists : PageLists
            From `pack` or `DecodePath.select`.
        out : Tensor, optional
            Where the result goes: contiguous, of the query's shape and dtype.
        """
        from coverage_lab.kernels.attend.triton import attend_kernel
        from coverage_lab.kernels.merge.triton import merge_kernel

        group = check_query(cache, query)
        if _shape(cache) != self._shape:
            raise ValueError(f"cache: {_shape(cache)}; the workspace is for {self._shape}")
        if group != self.group:
            raise ValueError(f"query: {group} heads a KV head; the workspace is for {self.group}")
        check_packed(cache, lists)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            check_out(out, query)
        sizes = {"GROUP": group, "DIM": cache.head_dim, "DIM_TILE": power_of_two(cache.head_dim)}
        overlap = can_overlap(query.device)
        attend_kernel[(self.blocks,)](
            query,
            cache.key,
            cache.value,
            lists.entries,
            lists.counts,
            out,
            self._parts,
            self._log_sums,
            self._first_page,
            self._share,
            self.scale * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            *cache.key_strides,
            *cache.value_strides,
            lists.entries.shape[2],
            cache.rows,
            cache.kv_heads,
            **sizes,
            GROUP_TILE=16,
            PAGE=cache.page_size,
            ROWS_TILE=power_of_two(cache.rows),
            LEAST=LEAST_PAGES,
            STAGES=_stages(cache),
            OVERLAP=overlap,
            num_warps=4,
        )
        # Its blocks are there when Attend ends, and wait for nothing but that.
        merge_kernel[(cache.rows, group)](
            self._parts,
            self._log_sums,
            lists.counts,
            self._first_page,
            self._share,
            out,
            **sizes,
            PARTS_TILE=16,
            OVERLAP=overlap,
            num_warps=2,
            **({"launch_pdl": True} if overlap else {}),
        )
        return out


def attend(
    query: Tensor, cache: PagedCache, pages: Tensor, counts: Tensor, scale: float | None = None
) -> Tensor:
    """Return attention over the page lists of any selector (paper 3.5).

    For many calls of one shape keep an `Attend`, which allocates once.

    Parameters
    ----------
    query : Tensor
        `[B, query heads, D]`, not scaled.
    cache : PagedCache
    pages : Tensor
        `[B, KV heads, width]` integers: pages of each row by their place in the request, each at most once,
        in any order; what lies beyond a row's count is not looked at.
    counts : Tensor
        `[B, KV heads]` integers: pages of each list.
    scale : float, optional
        Softmax scale; `1 / sqrt(D)` by default.

    Returns
    -------
    Tensor
        `[B, query heads, D]`; a row without tokens gives zeros.

    Raises
    ------
    ValueError
        For what can't be taken, before any launch; the message begins with the argument's name.
    """
    check_query(cache, query)
    check_lists(cache, pages, counts)
    scale = check_scale(scale, cache.head_dim)
    if backend(query.device, query.dtype) == "reference":
        return reference.attend(query, cache, pages, counts, scale)
    return Attend(cache, query.shape[1], scale)(query, cache, pack(cache, pages, counts))


def _shape(cache: PagedCache) -> tuple[int, int, int, torch.dtype, torch.device]:
    return cache.rows, cache.head_dim, cache.page_size, cache.key.dtype, cache.key.device


def _stages(cache: PagedCache) -> int:
    """How many pages are under way: as many as leave room for two blocks on a multiprocessor."""
    bytes_a_page = 2 * 2 * cache.page_size * power_of_two(cache.head_dim)
    return max(2, min(5, 1 + 72 * 1024 // bytes_a_page))
