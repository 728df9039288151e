"""What policies would have kept of a recorded trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking, oracle_counts, take
from coverage_lab.pages import Rows
from coverage_lab.policies.parallel import in_order
from coverage_lab.policies.policy import Policy
from coverage_lab.trace import Block, Span, Trace
from coverage_lab.trace.schema import oracle_column, share_column

# Realised coverage is counted in bins of this width, which bounds the error of its quantiles.
COVERAGE_BINS = 10_000

# A hair below the target is rounding of float32 sums, not a shortfall.
TOLERANCE = 1e-6

_PER_REQUEST = ("rows", "pages", "tokens", "oracle_pages", "oracle_tokens")
_PER_POLICY = ("kept", "kept_tokens", "coverage", "covered")

PoliciesOf = Callable[[int], Sequence[Policy]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Evaluation:
    """Sums per request and policy; everything reported is made of them.

    Attributes
    ----------
    rows, pages, tokens, oracle_pages, oracle_tokens : ndarray
        `[requests]`: rows, the pages and tokens they see, and those of C*(target).
    kept, kept_tokens, coverage, covered : ndarray
        `[requests, policies]`: pages and tokens kept, sum of realised coverage, rows whose realised
        coverage is at least the target.
    histogram : ndarray
        `[policies, bins + 1]`: rows by realised coverage, over all requests.
    target : float
        The coverage that rows should keep.
    """

    rows: np.ndarray
    pages: np.ndarray
    tokens: np.ndarray
    oracle_pages: np.ndarray
    oracle_tokens: np.ndarray
    kept: np.ndarray
    kept_tokens: np.ndarray
    coverage: np.ndarray
    covered: np.ndarray
    histogram: np.ndarray
    target: float

    def coverage_quantile(self, policy: int, q: float) -> float:
        """Return the q-quantile of realised coverage over all rows, to within 1 / COVERAGE_BINS."""
        counts = self.histogram[policy].cumsum()
        return float(np.searchsorted(counts, max(1.0, q * counts[-1]))) / COVERAGE_BINS


def evaluate(
    trace: Trace,
    policies: Sequence[Policy] | PoliciesOf,
    target: float = 0.95,
    realised: bool = True,
    progress: Callable[[int], None] = lambda request: None,
) -> Evaluation:
    """Apply policies to every row of a trace, in one pass.

    Parameters
    ----------
    trace : Trace
        With shares of the exact mass and of every estimator that the policies use.
    policies : sequence of Policy, or callable
        The policies, or a function from the place of a request to its policies (always as many).
    target : float
        Coverage that counts as enough, and gamma of the oracle set.
    realised : bool
        Whether to sum realised coverage and count its histogram; a search needs neither.
    progress : callable
        Called with the place of every request that is done.

    Returns
    -------
    Evaluation

    Raises
    ------
    CoverageLabError
        If the trace lacks a column, naming the option of `collect` that records it.
    """
    policies_of: PoliciesOf = policies if callable(policies) else lambda request: policies
    n_requests, n_policies = len(trace.shards), len(policies_of(0))
    sums = {name: np.zeros(n_requests) for name in _PER_REQUEST}
    sums |= {name: np.zeros((n_requests, n_policies)) for name in _PER_POLICY}
    histogram = np.zeros((n_policies, COVERAGE_BINS + 1))

    def work(span: Span) -> tuple[int, dict[str, np.ndarray], np.ndarray | None]:
        block = span.read()
        view = _View(block, trace.page_size, _group_size(trace))
        return block.request, *_block_sums(view, policies_of(block.request), target, realised)

    for request, part, counted in in_order(work, _spans(trace, policies_of(0), progress, target)):
        for name, value in part.items():
            sums[name][request] += value
        if counted is not None:
            histogram += counted
    return Evaluation(**sums, histogram=histogram, target=target)


def _block_sums(
    view: _View, policies: Sequence[Policy], target: float, realised: bool
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return the sums of one block by name, and its histogram of realised coverage."""
    n_pages = view.rows.n_pages
    oracle_pages, oracle_tokens = view.oracle(target)
    sums = {name: np.zeros(len(policies)) for name in _PER_POLICY}
    histogram = np.zeros((len(policies), COVERAGE_BINS + 1)) if realised else None
    for indices in _grouped(policies):
        kept, covered, coverage = _apply(view, [policies[i] for i in indices], target, realised)
        sums["kept"][indices] = kept.sum(0).numpy()
        sums["covered"][indices] = covered.sum(0).numpy()
        if histogram is not None and coverage is not None:
            sums["coverage"][indices] = coverage.sum(0, dtype=torch.float64).numpy()
            bins = (coverage * COVERAGE_BINS).round().long().clamp(0, COVERAGE_BINS)
            for column, index in enumerate(indices):
                histogram[index] = torch.bincount(bins[:, column], minlength=COVERAGE_BINS + 1).numpy()
    pages = n_pages.sum().numpy()
    sums |= {
        "kept_tokens": view.tokens(sums["kept"]),
        "rows": np.asarray(len(n_pages)),
        "pages": pages,
        "tokens": view.tokens(pages),
        "oracle_pages": np.asarray(oracle_pages),
        "oracle_tokens": np.asarray(oracle_tokens),
    }
    return sums, histogram


def policy_counts(
    trace: Trace,
    policies: Sequence[Policy],
    covering: float | None = None,
    progress: Callable[[int], None] = lambda request: None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield request, layer, KV head and pages `[rows]`, pages kept `[rows, policies]`, block by block.

    Rows go by layer, then KV head, then step. With `covering`, the counts are the fewest pages in the
    order of each policy whose exact mass reaches it, in place of those that the policy keeps.
    """

    def work(span: Span) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        block = span.read()
        view = _View(block, trace.page_size, _group_size(trace))
        kept = torch.empty((len(view.rows), len(policies)), dtype=torch.long)
        for indices in _grouped(policies):
            if covering is None:
                kept[:, indices] = _apply(view, [policies[i] for i in indices])[0]
            else:
                kept[:, indices] = view.ranked(policies[indices[0]]).need(covering)[:, None]
        layer, kv_head, n_pages = (block.columns[name] for name in ("layer", "kv_head", "n_pages"))
        return block.request, layer, kv_head, n_pages, kept.numpy()

    yield from in_order(work, _spans(trace, policies, progress))


def over_lists(
    trace: Trace, policy: Policy, work: Callable[[Block, np.ndarray, np.ndarray], Result]
) -> Iterator[Result]:
    """Yield what `work` makes of every block, in order.

    Parameters
    ----------
    trace : Trace
    policy : Policy
    work : callable
        From a block, the pages that the policy keeps of it, `[rows, width]` bool, and their exact shares,
        `[rows, width]` float32 that sum to one. Several run at a time.
    """

    def of_span(span: Span) -> Result:
        block = span.read()
        view = _View(block, trace.page_size, _group_size(trace))
        return work(block, _kept(view, policy).numpy(), view.exact.numpy())

    yield from in_order(of_span, _spans(trace, [policy], lambda request: None))


def _spans(
    trace: Trace, policies: Sequence[Policy], progress: Callable[[int], None], target: float | None = None
) -> Iterator[Span]:
    done = 0
    columns = needed_columns(policies, trace)
    if target in trace.gammas:
        columns.append(oracle_column(target))
    for span in trace.spans(columns):
        while done < span.request:
            progress(done)
            done += 1
        yield span
    progress(done)


class _View:
    """A block as tensors, with what policies share computed once."""

    def __init__(self, block: Block, page_size: int, group: int) -> None:
        self._block = block
        self.group = group
        numbers: dict[str, Any] = {
            name: torch.from_numpy(block.columns[name])
            for name in ("n_pages", "first_page", "position", "layer", "kv_head")
        }
        self.rows = Rows(**numbers, page_size=page_size)
        exact = torch.from_numpy(block.columns[share_column("exact")])
        # Rounded shares do not quite sum to one.
        self.exact = exact / exact.sum(1, keepdim=True)
        self._ranked: dict[object, _Ranked] = {}

    def shares(self, estimator: str, granularity: str, query_head: int | None = None) -> Tensor:
        shares = torch.from_numpy(self._block.columns[share_column(estimator, query_head)])
        if granularity != "layer":
            return shares
        block = self._block
        grid = shares.view(block.layers, block.kv_heads, block.steps, -1)
        return grid.mean(1, keepdim=True).expand_as(grid).reshape(shares.shape)

    def geometry(self, granularity: str) -> Rows:
        # Rows that share a list must round a fractional budget alike.
        if granularity != "layer":
            return self.rows
        return replace(self.rows, kv_head=torch.full_like(self.rows.kv_head, -1))

    def oracle(self, target: float) -> tuple[int, int]:
        """Pages and tokens of C*(target), over all rows."""
        recorded = self._block.columns.get(oracle_column(target))
        if recorded is None:
            counts = oracle_counts(self.exact, self.rows, torch.tensor([target], dtype=torch.float64))[:, 0]
        else:
            counts = torch.from_numpy(recorded)
        # The current page is the last one, so every page that ties with it comes first.
        current = self.exact.gather(1, self.rows.n_pages[:, None] - 1)
        ahead = (self.exact >= current).sum(1).minimum(self.rows.n_pages)
        tokens = counts * self.rows.page_size - self._missing() * (ahead <= counts)
        return int(counts.sum()), int(tokens.sum())

    def tokens(self, pages: np.ndarray) -> np.ndarray:
        """Tokens of so many pages over all rows, the current page of every row among them."""
        return pages * self.rows.page_size - self._missing().sum().numpy()

    def ranked(self, policy: Policy) -> _Ranked:
        """The pages in the order in which a policy takes them."""
        estimator = policy.estimator.name if policy.budget.reads_shares else "exact"
        key = (estimator, policy.granularity, policy.budget.order())
        if key not in self._ranked:
            shares = self.shares(estimator, policy.granularity)
            ranking = policy.budget.rank(shares, self.geometry(policy.granularity))
            self._ranked[key] = _Ranked(ranking, self.exact.gather(1, ranking.order).cumsum(1))
        return self._ranked[key]

    def _missing(self) -> Tensor:
        # Tokens that the current page does not have yet.
        return self.rows.page_size - 1 - self.rows.position % self.rows.page_size


@dataclass(frozen=True)
class _Ranked:
    """A ranking, and the exact coverage of its first k + 1 pages, `[rows, width]`."""

    ranking: Ranking
    realised: Tensor

    def need(self, target: float) -> Tensor:
        """`[rows]`: the fewest pages, forced ones among them, that cover the target; all where none do."""
        enough = torch.full((len(self.realised), 1), target - TOLERANCE)
        need = torch.searchsorted(self.realised, enough)[:, 0] + 1
        return need.maximum(self.ranking.n_forced).minimum(self.ranking.rows.n_pages)


def _apply(
    view: _View, policies: Sequence[Policy], target: float = 1.0, realised: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return pages kept, whether they cover and, if asked, how much, of policies that share a ranking.

    All are `[rows, policies]`.
    """
    first = policies[0]
    coverage: Tensor | None
    if first.granularity == "query_head":
        kept, coverage = _apply_union(view, policies)
        covered = coverage >= target - TOLERANCE
    else:
        ranked = view.ranked(first)
        kept = type(first.budget).counts(ranked.ranking, [policy.budget for policy in policies])
        covered = kept >= ranked.need(target)[:, None]
        coverage = ranked.realised.gather(1, kept - 1) if realised else None
    for column, policy in enumerate(policies):
        if policy.dense_layers:
            dense = torch.isin(view.rows.layer, torch.tensor(policy.dense_layers))
            kept[dense, column] = view.rows.n_pages[dense]
            covered[dense, column] = True
            if coverage is not None:
                coverage[dense, column] = 1.0
    return kept, covered, coverage


def _apply_union(view: _View, policies: Sequence[Policy]) -> tuple[Tensor, Tensor]:
    """Every query head selects; the row reads the union. Returns pages kept and realised coverage."""
    kept, coverage = [], []
    for policy in policies:
        union = _union(view, policy)
        kept.append(union.sum(1))
        coverage.append(view.exact.where(union, 0).sum(1))
    return torch.stack(kept, 1), torch.stack(coverage, 1)


def _union(view: _View, policy: Policy) -> Tensor:
    union = torch.zeros_like(view.exact, dtype=torch.bool)
    for head in range(view.group):
        union |= policy.budget.select(view.shares(policy.estimator.name, "query_head", head), view.rows)
    return union


def _kept(view: _View, policy: Policy) -> Tensor:
    """Return the pages that a policy keeps, `[rows, width]` bool."""
    if policy.granularity == "query_head":
        kept = _union(view, policy)
    else:
        ranking = view.ranked(policy).ranking
        kept = take(ranking, type(policy.budget).counts(ranking, [policy.budget])[:, 0])
    if policy.dense_layers:
        dense = torch.isin(view.rows.layer, torch.tensor(policy.dense_layers))
        kept |= dense[:, None] & view.rows.valid(kept.shape[1])
    return kept


def _grouped(policies: Sequence[Policy]) -> Iterator[list[int]]:
    """Yield the places of policies whose counts come from one ranking in one call."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, policy in enumerate(policies):
        budget = policy.budget
        groups[policy.estimator, policy.granularity, type(budget), budget.order()].append(index)
    yield from groups.values()


def _group_size(trace: Trace) -> int:
    return int(trace.geometry["query_heads"]) // int(trace.geometry["kv_heads"])


def needed_columns(policies: Sequence[Policy], trace: Trace) -> list[str]:
    """Return the columns that policies are evaluated on; raise CoverageLabError for an unknown layer."""
    columns = {share_column("exact")}
    layers = [layer["layer"] for layer in trace.geometry["layers"]]
    group = _group_size(trace)
    for policy in policies:
        unknown = set(policy.dense_layers) - set(layers)
        if unknown:
            raise CoverageLabError(
                f"policy {policy}: the trace has no layer {min(unknown)}; it has {layers[0]} to {layers[-1]}"
            )
        if policy.within is not None or policy.page_size not in (None, trace.page_size):
            raise CoverageLabError(
                f"policy {policy}: a trace has shares of its own pages of {trace.page_size} tokens and no "
                "others; coverage-lab replay can run this policy"
            )
        if policy.granularity == "query_head":
            columns.update(share_column(policy.estimator.name, head) for head in range(group))
        elif policy.budget.reads_shares:
            columns.add(share_column(policy.estimator.name))
    return sorted(columns)
