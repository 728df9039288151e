"""One decode step over the pages that matter: Estimate, Select, Attend, Merge (paper, section 3)."""

from __future__ import annotations

import math
import os
from typing import Literal

import torch
from torch import Tensor

from coverage_lab.kernels import step_reference
from coverage_lab.kernels.attend import reference as attend_reference
from coverage_lab.kernels.cache import PagedCache, check_kernel, check_query
from coverage_lab.kernels.lists import MOST_PAGES, PageLists, check_lists, pack

Kind = Literal["mvar", "mean", "quest"]

# Pages a block of Attend reads at least.
LEAST_PAGES = 4
# Numbers that a block merges at once.
MERGE_ELEMENTS = 4096
# Pages whose summaries a block of Estimate reads at once.
ESTIMATE_PAGES = 32
ESTIMATE_STAGES = 3
# Two blocks of Attend fit on a multiprocessor with their pipelines.
BLOCKS_PER_MULTIPROCESSOR = 2
# Thresholds a pass of Select, and warps a block, by pages of a row: measured on an H200.
SELECT_SIZES = ((512, 8, 4), (1024, 4, 4), (4096, 4, 8), (1 << 30, 2, 16))
MOST_ROWS = 4096
MOST_WIDTH = 16_384


class Attend:
    """Attention over page lists, with everything it writes allocated once.

    Parameters
    ----------
    cache : PagedCache
        Its shape, device and dtype are those of every later call.
    query_heads : int
    scale : float, optional
        Softmax scale; `1 / sqrt(D)` by default.
    blocks : int, optional
        Thread blocks; two a multiprocessor by default.
    """

    def __init__(
        self, cache: PagedCache, query_heads: int, scale: float | None = None, blocks: int | None = None
    ) -> None:
        device = cache.key.device
        if cache.rows > MOST_ROWS:
            raise ValueError(
                f"lengths: {cache.rows} rows (requests x KV heads); at most {MOST_ROWS} are possible"
            )
        if cache.physical_pages > MOST_PAGES:
            raise ValueError(f"key: {cache.physical_pages} pages; at most {MOST_PAGES} can be addressed")
        if query_heads < 1 or query_heads % cache.kv_heads:
            raise ValueError(f"query_heads: {query_heads} is no multiple of {cache.kv_heads} KV heads")
        self.scale = cache.head_dim**-0.5 if scale is None else scale
        self.rows = cache.rows
        self.group = query_heads // cache.kv_heads
        if blocks is None:
            blocks = 8
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                blocks = BLOCKS_PER_MULTIPROCESSOR * processors
        self.blocks = blocks
        self._parts = torch.empty(2 * blocks, self.group, cache.head_dim, device=device)
        self._log_sums = torch.empty(2 * blocks, self.group, device=device)
        # Blocks that have done their part of a row; the last one sets it back.
        self._arrivals = torch.zeros(cache.rows, dtype=torch.int32, device=device)

    def __call__(
        self, query: Tensor, cache: PagedCache, lists: PageLists, out: Tensor | None = None
    ) -> Tensor:
        """Return `[B, query heads, D]`; nothing waits for the device."""
        from coverage_lab.kernels.attend.triton import attend_kernel

        group = check_kernel(cache, query)
        if (cache.rows, group, cache.head_dim) != (self.rows, self.group, self._parts.shape[2]):
            raise ValueError(
                f"cache: {cache.rows} rows of {group} heads of {cache.head_dim}; the workspace is for "
                f"{self.rows} of {self.group} of {self._parts.shape[2]}"
            )
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        elif (out.shape, out.dtype, out.device) != (query.shape, query.dtype, query.device):
            raise ValueError(f"out: {tuple(out.shape)} {out.dtype} on {out.device} is not like the query")
        elif not out.is_contiguous():
            raise ValueError("out: must be contiguous")
        heads_tile, dim_tile = power_of_two(group), power_of_two(cache.head_dim)
        attend_kernel[(self.blocks,)](
            query,
            cache.key,
            cache.value,
            lists.entries,
            lists.counts,
            out,
            self._parts,
            self._log_sums,
            self._arrivals,
            self.scale * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            *cache.key_strides,
            *cache.value_strides,
            lists.entries.stride(1),
            cache.rows,
            cache.kv_heads,
            GROUP=group,
            GROUP_TILE=16,
            DIM=cache.head_dim,
            DIM_TILE=dim_tile,
            PAGE=cache.page_size,
            ROWS_TILE=power_of_two(cache.rows),
            LEAST=LEAST_PAGES,
            HEADS_TILE=heads_tile,
            PARTS_TILE=max(1, MERGE_ELEMENTS // (heads_tile * dim_tile)),
            STAGES=_stages(cache),
            num_warps=4,
        )
        return out


class DecodePath:
    """The four kernels as one call, with a workspace of its own; it can be captured in a CUDA graph.

    Without a GPU that the kernels can use, the references in plain torch serve (`backend` says which).

    Parameters
    ----------
    cache : PagedCache
        Its tensors are read in place at every call.
    query_heads : int
    gamma : float, optional
        Coverage of the rule, in (0, 1].
    count : int, optional
        Pages of every list (the fixed-count mode) in place of `gamma`, sink and current page included.
    estimator : {"mvar", "mean", "quest"}
    scale : float, optional
        Softmax scale; `1 / sqrt(D)` by default.

    Attributes
    ----------
    backend : {"triton", "reference"}
    log_mass : Tensor
        `[rows, G, pages]` float32: what the latest call estimated; beyond a row's pages anything.
    pages, counts : Tensor
        `[B, KV heads, pages]` and `[B, KV heads]` int32: the lists of the latest call.
    """

    def __init__(
        self,
        cache: PagedCache,
        query_heads: int,
        *,
        gamma: float | None = None,
        count: int | None = None,
        estimator: Kind = "mvar",
        scale: float | None = None,
    ) -> None:
        if (gamma is None) == (count is None):
            raise ValueError("gamma: give either gamma or count")
        if gamma is not None:
            check_gamma(gamma)
        if count is not None and count < 1:
            raise ValueError(f"count: {count} is less than one page")
        if estimator not in ("mvar", "mean", "quest"):
            raise ValueError(f"estimator: {estimator!r} is not mvar, mean or quest")
        if cache.max_pages > MOST_WIDTH:
            raise ValueError(
                f"lengths: up to {cache.max_pages} pages; at most {MOST_WIDTH} a row are possible"
            )
        self.cache, self.query_heads, self.estimator = cache, query_heads, estimator
        # Without a table the kernels take any pointer in its place.
        self._table = cache.lengths if cache.table is None else cache.table
        self.count = count
        self._gamma = gamma
        device, rows = cache.key.device, (cache.batch, cache.kv_heads)
        self.backend = backend(cache.key.device)
        self._attend = Attend(cache, query_heads, scale)
        self.scale = self._attend.scale
        # Three blocks of Estimate fit on a multiprocessor, where two of Attend do.
        self._estimate_blocks = 3 * self._attend.blocks // 2
        self._budget = torch.tensor([gamma if count is None else count], dtype=torch.float64, device=device)
        shape = cache.physical_pages, cache.kv_heads, 2, cache.head_dim
        self._summary = torch.empty(shape, dtype=cache.key.dtype, device=device)
        self.log_mass = torch.empty(cache.rows, self._attend.group, cache.max_pages, device=device)
        self.pages = torch.empty(*rows, cache.max_pages, dtype=torch.int32, device=device)
        self.counts = torch.empty(rows, dtype=torch.int32, device=device)
        self.lists = PageLists(torch.empty_like(self.pages), self.counts)
        self._reads = torch.zeros(cache.rows, 2, dtype=torch.int64, device=device)

    @property
    def gamma(self) -> float | None:
        """Coverage of the rule; it lies in device memory, so that a captured graph follows a change."""
        return self._gamma

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        if self.count is not None:
            raise ValueError("gamma: this path was made for a fixed count")
        check_gamma(gamma)
        self._gamma = gamma
        self._budget.fill_(gamma)

    @property
    def reads(self) -> Tensor:
        """Pages kept and pages seen, `[2]` int64 on the device, summed over all calls and rows."""
        return self._reads.sum(0)

    def summarize(self) -> None:
        """Write the summaries of all full pages: once, after the prefill."""
        if self.backend == "reference":
            step_reference.summarize(self.cache, self.estimator, self._summary)
            return
        from coverage_lab.kernels.summarize.triton import summarize_kernel

        cache = self.cache
        summarize_kernel[(cache.rows, cache.max_pages)](
            cache.key,
            cache.lengths,
            self._table,
            self._summary,
            *cache.key_strides,
            self._table.stride(0),
            cache.max_pages,
            cache.kv_heads,
            DIM=cache.head_dim,
            DIM_TILE=power_of_two(cache.head_dim),
            PAGE=cache.page_size,
            HAS_TABLE=cache.table is not None,
            KIND=self.estimator,
        )

    def estimate(self, query: Tensor) -> Tensor:
        """Write and return the log masses, `[rows, G, pages]` float32; beyond a row nothing is written."""
        if check_query(self.cache, query) != self._attend.group:
            raise ValueError(f"query: {query.shape[1]} heads; this path was made for {self.query_heads}")
        if self.backend == "reference":
            found = step_reference.estimate(query, self.cache, self.estimator, self.scale, self._summary)
            self.log_mass.copy_(found)
            step_reference.summarize(self.cache, self.estimator, self._summary, filled_only=True)
            return self.log_mass
        from coverage_lab.kernels.estimate.triton import estimate_kernel

        cache = self.cache
        tiles = -(-cache.max_pages // ESTIMATE_PAGES)
        parts = min(tiles, max(1, round(self._estimate_blocks / cache.rows)))
        estimate_kernel[(cache.rows, parts + 2)](
            query,
            cache.key,
            cache.lengths,
            self._table,
            self._summary,
            self.log_mass,
            self.scale,
            query.stride(0),
            query.stride(1),
            *cache.key_strides,
            self._table.stride(0),
            cache.max_pages,
            cache.kv_heads,
            self.log_mass.stride(0),
            self.log_mass.stride(1),
            GROUP=self._attend.group,
            GROUP_TILE=16,
            DIM=cache.head_dim,
            DIM_TILE=power_of_two(cache.head_dim),
            PAGE=cache.page_size,
            LOG_PAGE=math.log(cache.page_size),
            PAGES_TILE=ESTIMATE_PAGES,
            STAGES=ESTIMATE_STAGES,
            HAS_TABLE=cache.table is not None,
            KIND=self.estimator,
        )
        return self.log_mass

    def select(self) -> PageLists:
        """Write and return the lists that the budget makes of the latest log masses."""
        if self.backend == "reference":
            pages, counts = step_reference.select(self.log_mass, self.cache, self.gamma, self.count)
            self.pages.copy_(pages.view_as(self.pages))
            packed = pack(self.cache, self.pages, counts.view_as(self.counts))
            self.counts.copy_(packed.counts)
            self.lists.entries.copy_(packed.entries)
            seen = -(-self.cache.lengths.long() // self.cache.page_size).sum() * self.cache.kv_heads
            self._reads[0] += torch.stack([counts.sum(), seen])
            return self.lists
        from coverage_lab.kernels.select.triton import select_kernel

        cache = self.cache
        width = power_of_two(cache.max_pages)
        thresholds, warps = next(pair for most, *pair in SELECT_SIZES if width <= most)
        select_kernel[(cache.rows,)](
            self.log_mass,
            cache.lengths,
            self._table,
            self._budget,
            self.lists.entries,
            self.pages,
            self.counts,
            self._reads,
            self._table.stride(0),
            cache.kv_heads,
            self.log_mass.stride(0),
            self.log_mass.stride(1),
            cache.max_pages,
            GROUP=self._attend.group,
            PAGE=cache.page_size,
            WIDTH=width,
            HEADS_TILE=min(power_of_two(self._attend.group), max(1, 16_384 // width)),
            THRESHOLDS=thresholds,
            BY_COUNT=self.count is not None,
            HAS_TABLE=cache.table is not None,
            num_warps=warps,
        )
        return self.lists

    def attend(self, query: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the attention over the latest lists, `[B, query heads, D]`."""
        if self.backend == "reference":
            check_query(self.cache, query)
            found = attend_reference.attend(query, self.cache, self.pages, self.counts, self.scale)
            return found if out is None else out.copy_(found)
        return self._attend(query, self.cache, self.lists, out)

    def __call__(self, query: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the attention of a decode step, `[B, query heads, D]`, over the pages it selects.

        `query` is `[B, query heads, D]`, not scaled; the keys and values of the step are in the cache.
        """
        if self.backend == "triton":
            check_kernel(self.cache, query)
        self.estimate(query)
        self.select()
        return self.attend(query, out)


def attend(
    query: Tensor, cache: PagedCache, pages: Tensor, counts: Tensor, scale: float | None = None
) -> Tensor:
    """Return attention over the page lists of any selector (paper 3.5).

    Parameters are those of `attend.reference.attend`; off the GPU that is what runs. For many calls of one
    shape keep an `Attend`, which allocates once.
    """
    check_query(cache, query)
    check_lists(cache, pages, counts)
    scale = cache.head_dim**-0.5 if scale is None else scale
    if backend(query.device) == "reference":
        return attend_reference.attend(query, cache, pages, counts, scale)
    return Attend(cache, query.shape[1], scale)(query, cache, pack(cache, pages, counts))


def backend(device: torch.device) -> Literal["triton", "reference"]:
    """Return what runs on a device: the Triton kernels on a GPU with bf16 or in Triton's interpreter."""
    if device.type == "cuda":
        return "triton" if torch.cuda.get_device_capability(device) >= (8, 0) else "reference"
    return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "reference"


def check_gamma(gamma: float) -> None:
    """Raise ValueError if this is no coverage."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma: {gamma} is not in (0, 1]")


def power_of_two(number: int) -> int:
    """Return the least power of two from `number` on."""
    return 1 << (number - 1).bit_length()


def _stages(cache: PagedCache) -> int:
    """How many pages are under way: as many as leave room for two blocks on a multiprocessor."""
    bytes_a_page = 2 * 2 * cache.page_size * power_of_two(cache.head_dim)
    return max(2, min(5, 1 + 72 * 1024 // bytes_a_page))
