"""One decode step over the pages that matter: Estimate, Select, Attend, Merge (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from coverage_lab.kernels import launch, step_reference
from coverage_lab.kernels.attend import reference as attend_reference
from coverage_lab.kernels.cache import PagedCache, check_heads, check_out, check_query, check_scale
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
        `[1]` float64, or `[rows]`: of all rows, or of each.
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

    Call `summarize` once after the prefill. From then on every step adds one token to a request at most, in
    the cache's tensors and in `cache.lengths`, and the page that it fills is summarized on the way. After
    any other change of the keys, `summarize` again.

    Without a GPU that the kernels can use, the references in plain torch serve (`backend` says which).

    Parameters
    ----------
    cache : PagedCache
        Its tensors are read in place at every call.
    query_heads : int
    gamma : float, optional
        Coverage of the rule, in (0, 1].
    count : int or Tensor, optional
        Pages of every list (the fixed-count mode) in place of `gamma`, or `[B, KV heads]` of each; the sink
        and the current page are always among them.
    estimator : {"mvar", "mean", "quest"}
    scale : float, optional
        Softmax scale; `1 / sqrt(D)` by default.

    Attributes
    ----------
    backend : {"triton", "reference"}
    log_mass : Tensor
        `[rows, G, pages]` float32: what the latest call estimated; beyond a row's pages anything.
    pages, counts : Tensor
        `[B, KV heads, pages]` and `[B, KV heads]` int32: the lists of the latest call, sink first and
        current page last. A request without tokens has a count of one, of a page without tokens.

    Raises
    ------
    ValueError
        For what the kernels can't take, before any launch; the message begins with the argument's name.
    """

    def __init__(
        self,
        cache: PagedCache,
        query_heads: int,
        *,
        gamma: float | None = None,
        count: int | Tensor | None = None,
        estimator: Kind = "mvar",
        scale: float | None = None,
    ) -> None:
        if (gamma is None) == (count is None):
            raise ValueError("gamma: give either gamma or count")
        if gamma is not None:
            check_gamma(gamma)
        if isinstance(count, Tensor):
            check_counts(count, cache)
        elif count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"count: {count} is no whole number of pages from one on")
        if estimator not in ("mvar", "mean", "quest"):
            raise ValueError(f"estimator: {estimator!r} is not mvar, mean or quest")
        if cache.max_pages > MOST_WIDTH:
            raise ValueError(
                f"lengths: up to {cache.max_pages} pages; at most {MOST_WIDTH} a row are possible"
            )
        device, rows = cache.key.device, (cache.batch, cache.kv_heads)
        self.backend = backend(device, cache.key.dtype)
        group = check_heads(cache, query_heads)
        self._attend = Attend(cache, query_heads, scale) if self.backend == "triton" else None
        self._step = Step(
            cache=cache,
            group=group,
            estimator=estimator,
            scale=check_scale(scale, cache.head_dim),
            # Three blocks of Estimate fit on a multiprocessor, where two of Attend do.
            estimate_blocks=3 * self._attend.blocks // 2 if self._attend else 0,
            by_count=count is not None,
            budget=torch.as_tensor(gamma if count is None else count, dtype=torch.float64, device=device)
            .reshape(-1)
            .clone(),
            summary=torch.empty(
                (cache.physical_pages, cache.kv_heads, 2, cache.head_dim),
                dtype=cache.key.dtype,
                device=device,
            ),
            log_mass=torch.empty(cache.rows, group, cache.max_pages, dtype=torch.float32, device=device),
            pages=torch.zeros(*rows, cache.max_pages, dtype=torch.int32, device=device),
            # Before the first step a list is one page without tokens.
            lists=PageLists(
                torch.zeros(*rows, cache.max_pages, dtype=torch.int32, device=device),
                torch.ones(rows, dtype=torch.int32, device=device),
                cache.page_size,
            ),
            reads=torch.zeros(cache.rows, 2, dtype=torch.int64, device=device),
        )
        self.cache, self.query_heads, self.scale = cache, query_heads, self._step.scale
        self.count, self._gamma = count, gamma
        self.log_mass, self.lists, self.pages = self._step.log_mass, self._step.lists, self._step.pages
        self.counts = self.lists.counts
        self._summarized = False
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
        self._summarized = True

    def estimate(self, query: Tensor) -> Tensor:
        """Write and return the log masses, `[rows, G, pages]` float32; beyond a row nothing is written."""
        self._check(query)
        if not self._summarized:
            raise ValueError("summaries: there are none yet; call summarize once after the prefill")
        self._kernels.estimate(self._step, query)
        return self.log_mass

    def estimate_error(self, query: Tensor) -> float:
        """Return the largest error of the latest estimate against the reference, over one more than its size.

        Log masses are compared, made of the same summaries, and the summaries themselves after the step. It
        waits for the device.
        """
        step = self._step
        wanted = replace(step, log_mass=torch.empty_like(step.log_mass), summary=step.summary.clone())
        step_reference.estimate(wanted, query)
        worst = 0.0
        for found, right in ((step.log_mass, wanted.log_mass), (step.summary, wanted.summary)):
            there = right.isfinite()
            error = (found.float() - right.float()).abs() / (1 + right.float().abs())
            worst = max([worst, float(error.where(there, 0).nan_to_num(nan=torch.inf).max())])
        return worst

    def select(self) -> PageLists:
        """Write and return the lists that the budget makes of the latest log masses."""
        self._kernels.select(self._step)
        return self.lists

    def attend(self, query: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the attention over the latest lists, `[B, query heads, D]`, in `out` if given."""
        self._check(query, out)
        if self._attend is not None:
            return self._attend(query, self.cache, self.lists, out)
        found = attend_reference.attend(query, self.cache, self.pages, self.counts, self.scale)
        return found if out is None else out.copy_(found)

    def __call__(self, query: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the attention of a decode step over the pages that it selects.

        Parameters
        ----------
        query : Tensor
            `[B, query heads, D]`, not scaled; the keys and values of the step are in the cache, and
            `cache.lengths` count them.
        out : Tensor, optional
            Where the result goes: contiguous, of the query's shape and dtype.

        Returns
        -------
        Tensor
            `[B, query heads, D]`.
        """
        self._check(query, out)
        self.estimate(query)
        self.select()
        return self.attend(query, out)

    def _check(self, query: Tensor, out: Tensor | None = None) -> None:
        """Raise ValueError for a query or an output that this path was not made for."""
        if check_query(self.cache, query) != self._step.group:
            raise ValueError(f"query: {query.shape[1]} heads; this path was made for {self.query_heads}")
        if out is not None:
            check_out(out, query)


def check_gamma(gamma: float) -> None:
    """Raise ValueError if this is no coverage."""
    if not isinstance(gamma, Real) or not 0 < gamma <= 1:
        raise ValueError(f"gamma: {gamma!r} is not a number in (0, 1]")


def check_counts(counts: Tensor, cache: PagedCache) -> None:
    """Raise ValueError if these are no page counts of the rows of a cache."""
    rows = (cache.batch, cache.kv_heads)
    if counts.shape != rows or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"count: must hold integers {rows}, not {counts.dtype} {tuple(counts.shape)}")
    if counts.min() < 1:
        raise ValueError(f"count: {int(counts.min())} is no whole number of pages from one on")
