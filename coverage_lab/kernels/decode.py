"""One decode step over the pages that matter: Estimate, Select, Attend, Merge (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coverage_lab.kernels import launch, step_reference
from coverage_lab.kernels.attend import reference as attend_reference
from coverage_lab.kernels.cache import PagedCache, check_kernel, check_query
from coverage_lab.kernels.device import backend
from coverage_lab.kernels.lists import PageLists
from coverage_lab.kernels.ragged import Attend

Kind = Literal["mvar", "mean", "quest"]

MOST_WIDTH = 16_384


@dataclass(frozen=True, kw_only=True)
class Step:
    """All that Estimate and Select read and write; allocated once.

    Attributes
    ----------
    cache : PagedCache
    group : int
        Query heads a KV head.
    estimator : {"mvar", "mean", "quest"}
    scale : float
        Softmax scale.
    estimate_blocks : int
        Thread blocks of Estimate that run at a time.
    by_count : bool
        Whether the budget is a count of pages, not a coverage.
    budget : Tensor
        `[1]` float64.
    summary : Tensor
        `[physical pages, KV heads, 2, D]`, of the cache's dtype.
    log_mass : Tensor
        `[rows, G, pages]` float32.
    pages : Tensor
        `[B, KV heads, pages]` int32: the lists, by the place of a page in its request.
    lists : PageLists
        The same lists as Attend reads them.
    reads : Tensor
        `[rows, 2]` int64: pages kept and pages seen, over all steps.
    """

    cache: PagedCache
    group: int
    estimator: Kind
    scale: float
    estimate_blocks: int
    by_count: bool
    budget: Tensor
    summary: Tensor
    log_mass: Tensor
    pages: Tensor
    lists: PageLists
    reads: Tensor

    @property
    def table(self) -> Tensor:
        """The page table; without one the kernels take any pointer in its place."""
        return self.cache.lengths if self.cache.table is None else self.cache.table


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
        device, rows = cache.key.device, (cache.batch, cache.kv_heads)
        self.backend = backend(device)
        self._attend = Attend(cache, query_heads, scale)
        self._step = Step(
            cache=cache,
            group=self._attend.group,
            estimator=estimator,
            scale=self._attend.scale,
            # Three blocks of Estimate fit on a multiprocessor, where two of Attend do.
            estimate_blocks=3 * self._attend.blocks // 2,
            by_count=count is not None,
            budget=torch.tensor([gamma if count is None else count], dtype=torch.float64, device=device),
            summary=torch.empty(
                (cache.physical_pages, cache.kv_heads, 2, cache.head_dim),
                dtype=cache.key.dtype,
                device=device,
            ),
            log_mass=torch.empty(cache.rows, self._attend.group, cache.max_pages, device=device),
            pages=torch.empty(*rows, cache.max_pages, dtype=torch.int32, device=device),
            lists=PageLists(
                torch.empty(*rows, cache.max_pages, dtype=torch.int32, device=device),
                torch.empty(rows, dtype=torch.int32, device=device),
            ),
            reads=torch.zeros(cache.rows, 2, dtype=torch.int64, device=device),
        )
        self.cache, self.query_heads, self.scale = cache, query_heads, self._step.scale
        self.count, self._gamma = count, gamma
        self.log_mass, self.lists, self.pages = self._step.log_mass, self._step.lists, self._step.pages
        self.counts = self.lists.counts
        self._kernels = launch if self.backend == "triton" else step_reference

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
        self._step.budget.fill_(gamma)

    @property
    def reads(self) -> Tensor:
        """Pages kept and pages seen, `[2]` int64 on the device, summed over all calls and rows."""
        return self._step.reads.sum(0)

    def summarize(self) -> None:
        """Write the summaries of all full pages: once, after the prefill."""
        self._kernels.summarize(self._step)

    def estimate(self, query: Tensor) -> Tensor:
        """Write and return the log masses, `[rows, G, pages]` float32; beyond a row nothing is written."""
        if check_query(self.cache, query) != self._step.group:
            raise ValueError(f"query: {query.shape[1]} heads; this path was made for {self.query_heads}")
        self._kernels.estimate(self._step, query)
        return self.log_mass

    def select(self) -> PageLists:
        """Write and return the lists that the budget makes of the latest log masses."""
        self._kernels.select(self._step)
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


def check_gamma(gamma: float) -> None:
    """Raise ValueError if this is no coverage."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma: {gamma} is not in (0, 1]")
