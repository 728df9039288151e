"""Which pages a policy keeps in one decode step of one layer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.pages import Rows, page_range
from coverage_lab.policies.policy import Policy

# Takes exact and estimated log masses `[KV heads, G, P]`, the rows and their layer; returns the pages kept.
Rule = Callable[[Tensor, Tensor, Rows, int], Tensor]


@dataclass(frozen=True)
class Choice:
    """The pages that one layer keeps in one step.

    Attributes
    ----------
    kept : Tensor
        `[KV heads, P]` bool.
    exact, estimate : Tensor
        `[KV heads, G, P]` float32: log masses, exact and as the policy's estimator has them.
    rows : Rows
        One row a KV head.
    values : int or Tensor
        Values read besides keys and values, over all KV heads.
    """

    kept: Tensor
    exact: Tensor
    estimate: Tensor
    rows: Rows
    values: int | Tensor


class Selector:
    """Chooses the pages of one request under a policy, step by step; one token is new in each.

    Parameters
    ----------
    policy : Policy
    page_size : int
        Tokens a page, where the policy does not say.
    summary_dtype : torch.dtype, optional
        Type that summaries are kept in; float32 by default.
    rule : callable, optional
        Keeps pages in place of the policy's own budget; see `Rule`.
    """

    def __init__(
        self,
        policy: Policy,
        page_size: int,
        summary_dtype: torch.dtype | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.policy = policy
        self._rule = rule or (lambda exact, estimate, rows, layer: choose(policy, estimate, rows, layer))
        self.page_size = policy.page_size or page_size
        estimator = policy.estimator
        estimates = {} if estimator.name == "exact" or not policy.budget.reads_shares else {"": estimator}
        self._recorder = RequestRecorder(self.page_size, estimates, summary_dtype=summary_dtype)
        within = policy.within
        self._candidates = None if within is None else Selector(within, page_size, summary_dtype)

    def see(self, call: AttentionCall, cached: int) -> None:
        """Summarize the prompt's keys, of which `cached` are in the cache."""
        self._recorder.see(call, 0, cached, None)
        if self._candidates is not None:
            self._candidates.see(call, cached)

    def choose(self, call: AttentionCall, cached: int) -> Choice:
        """Return what the policy keeps; `cached` tokens are in the cache, the new one among them."""
        masses = self._recorder.masses(call, 0, cached)
        rows = rows_of(call, cached - 1, self.page_size)
        exact, estimate = masses[0], masses[-1]
        pages = estimate.shape[-1] * estimate.shape[0]
        if self._candidates is None or call.layer in self.policy.dense_layers:
            kept = self._rule(exact, estimate, rows, call.layer)
            return Choice(kept, exact, estimate, rows, self._values(call, pages))
        allowed, values = self._candidates.heads(call, cached, self.page_size)
        estimate = estimate.masked_fill(~allowed, -torch.inf)
        kept = self._rule(exact, estimate, rows, call.layer) & allowed.any(1)
        return Choice(kept, exact, estimate, rows, values + self._values(call, allowed.any(1).sum()))

    def heads(self, call: AttentionCall, cached: int, page_size: int) -> tuple[Tensor, int | Tensor]:
        """Return what each query head may keep, in pages of another size, and the values read for it.

        `[KV heads, G, P]` bool: a page that shares a token with one that this policy keeps.
        """
        masses = self._recorder.masses(call, 0, cached)
        rows = rows_of(call, cached - 1, self.page_size)
        estimate = masses[-1]
        if self.policy.granularity == "query_head" and call.layer not in self.policy.dense_layers:
            kept = by_query_head(self.policy, estimate, rows)
        else:
            kept = choose(self.policy, estimate, rows, call.layer)[:, None].expand_as(estimate)
        first, count = page_range(cached - 1, page_size, call.window)
        tokens = torch.arange(first * page_size, (first + count) * page_size, device=kept.device)
        # The window may begin within a page of one size and at the edge of one of the other.
        oldest, _ = page_range(cached - 1, self.page_size, call.window)
        place = (tokens // self.page_size - oldest).clamp(0, kept.shape[-1] - 1)
        allowed = kept[..., place].unflatten(-1, (count, page_size)).any(-1)
        return allowed, self._values(call, estimate.shape[-1] * estimate.shape[0])

    def measure(self, call: AttentionCall, cached: int, kept: Tensor) -> Choice:
        """Return a choice that was made elsewhere, with the exact masses in place of the estimated ones."""
        exact = self._recorder.masses(call, 0, cached, estimates=False)[0]
        rows = rows_of(call, cached - 1, self.page_size)
        return Choice(kept, exact, exact, rows, self._values(call, kept.numel()))

    def fork(self, rule: Rule | None = None) -> Selector:
        """Return a selector that has seen the same and goes on alone, by another rule if one is given."""
        twin = copy.copy(self)
        twin._rule = rule or self._rule
        twin._recorder = self._recorder.fork()
        twin._candidates = None if self._candidates is None else self._candidates.fork()
        return twin

    def _values(self, call: AttentionCall, pages: int | Tensor) -> int | Tensor:
        """Values read for the estimates of so many pages, and for what stands in for them."""
        policy, head_dim = self.policy, call.key.shape[-1]
        if call.layer in policy.dense_layers:
            return 0
        own = policy.estimator.metadata_values(head_dim, self.page_size) if policy.budget.reads_shares else 0
        return pages * (own + (head_dim if policy.compensate else 0))


def rows_of(call: AttentionCall, position: int, page_size: int) -> Rows:
    """Return the geometry of one step's rows, one a KV head; the query is at `position`."""
    first, n_pages = page_range(position, page_size, call.window)
    of = functools.partial(_constant, call.key.shape[1], call.key.device)
    return Rows(
        n_pages=of(n_pages),
        first_page=of(first),
        position=of(position),
        layer=of(call.layer),
        kv_head=_heads(call.key.shape[1], call.key.device),
        page_size=page_size,
        fewest=n_pages,
    )


# Rows of a step are alike, and made once: what is small costs as much as a launch on a GPU.
@functools.lru_cache(maxsize=4096)
def _constant(kv_heads: int, device: torch.device, value: int) -> Tensor:
    return torch.full((kv_heads,), value, device=device)


@functools.lru_cache(maxsize=16)
def _heads(kv_heads: int, device: torch.device) -> Tensor:
    return torch.arange(kv_heads, device=device)


def choose(policy: Policy, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
    """Return the pages that a policy keeps in one step, `[KV heads, P]` bool.

    Parameters
    ----------
    policy : Policy
    estimate : Tensor
        `[KV heads, G, P]`: log masses of the policy's estimator.
    rows : Rows
        One row a KV head.
    layer : int
        That of the rows.
    """
    if layer in policy.dense_layers:
        return torch.ones(estimate.shape[0], estimate.shape[2], dtype=torch.bool, device=estimate.device)
    if policy.granularity == "query_head":
        return by_query_head(policy, estimate, rows).any(1)
    return policy.budget.select(*shared(policy, estimate, rows))


def shared(policy: Policy, estimate: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Return the shares `[KV heads, P]` that choose lists of KV heads or layers, and the rows."""
    if policy.granularity == "layer":
        shares = group_shares(estimate).mean(0, keepdim=True).expand(len(estimate), -1)
        # A list that all KV heads share rounds a fractional budget once.
        return shares, replace(rows, kv_head=torch.full_like(rows.kv_head, -1))
    return group_shares(estimate), rows


def by_query_head(policy: Policy, estimate: Tensor, rows: Rows) -> Tensor:
    """Return the pages that every query head keeps on its own, `[KV heads, G, P]` bool."""
    shares = estimate.softmax(-1)
    picked = [policy.budget.select(shares[:, head], rows) for head in range(shares.shape[1])]
    return torch.stack(picked, 1)
