"""Which pages a policy keeps in some decode steps of one layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.summaries import PageSummaries
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.block import Block

# Takes exact and estimated log masses `[rows, G, P]`, the rows and their layer; returns the pages kept.
Rule = Callable[[Tensor, Tensor, Rows, int], Tensor]


@dataclass(frozen=True)
class Choice:
    """The pages that one layer keeps in some steps.

    Attributes
    ----------
    kept : Tensor
        `[rows, P]` bool; a row is a KV head in a step.
    estimate : Tensor
        `[rows, G, P]` float32: log masses as the policy's estimator has them.
    block : Block
        The logits behind it.
    values : int or Tensor
        Values read besides keys and values, over all rows.
    """

    kept: Tensor
    estimate: Tensor
    block: Block
    values: int | Tensor


class Selector:
    """Chooses the pages of one request under a policy.

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
        self.page_size = policy.page_size or page_size
        self._rule = rule or (lambda exact, estimate, rows, layer: choose(policy, estimate, rows, layer))
        self._summaries: PageSummaries | None = None
        if policy.estimator.name != "exact" and _estimates(policy):
            self._summaries = PageSummaries(policy.estimator, self.page_size, summary_dtype)
        within = policy.within
        self._candidates = None if within is None else Selector(within, page_size, summary_dtype)

    def see(self, call: AttentionCall, cached: int) -> None:
        """Summarize the keys of a call, after which `cached` tokens are in the cache."""
        if self._summaries is not None:
            held = min(cached, call.key.shape[2])
            self._summaries.extend(call.layer, call.key[0, :, :held], cached - held)
        if self._candidates is not None:
            self._candidates.see(call, cached)

    def choose(self, call: AttentionCall, cached: int) -> Choice:
        """Return what the policy keeps in the steps that the call's tokens are."""
        self.see(call, cached)
        block, estimate, allowed, values = self._masses(call, cached)
        rows = block.geometry.rows
        kept = self._rule(block.exact, estimate, rows, call.layer)
        if allowed is not None:
            kept &= allowed.any(1)
        return Choice(kept, estimate, block, values)

    def heads(self, call: AttentionCall, cached: int, other: Block) -> tuple[Tensor, int | Tensor]:
        """Return what each query head may keep, in the pages of another block, and the values read for it.

        `[rows, G, P]` bool: a page that shares a token with one that this policy keeps.
        """
        block, estimate, own, values = self._masses(call, cached)
        rows, size = block.geometry.rows, self.page_size
        if self.policy.granularity == "query_head" and call.layer not in self.policy.dense_layers:
            kept = by_query_head(self.policy, estimate, rows)
        else:
            kept = choose(self.policy, estimate, rows, call.layer)[:, None].expand_as(estimate)
        if own is not None:
            kept = kept & own
        theirs = other.geometry.rows
        tokens = torch.arange(other.geometry.width * other.page_size, device=kept.device)
        tokens = tokens + theirs.first_page[:, None] * other.page_size
        # The window may begin within a page of one size and at the edge of one of the other.
        place = (tokens // size - rows.first_page[:, None]).clamp(0, kept.shape[-1] - 1)
        allowed = kept.gather(-1, place[:, None].expand(-1, kept.shape[1], -1))
        allowed = allowed.unflatten(-1, (-1, other.page_size)).any(-1)
        allowed &= theirs.valid(allowed.shape[-1])[:, None]
        return allowed, values

    def measure(self, call: AttentionCall, cached: int, kept: Tensor) -> Choice:
        """Return a choice that was made elsewhere, with the exact masses in place of the estimated ones."""
        block = Block(call, cached, self.page_size)
        return Choice(kept, block.exact, block, self._values(call, block.geometry.rows.n_pages.sum()))

    def fork(self, rule: Rule | None = None) -> Selector:
        """Return a selector that has seen the same and goes on alone, by another rule if one is given."""
        twin = copy.copy(self)
        twin._rule = rule or self._rule
        twin._summaries = None if self._summaries is None else self._summaries.fork()
        twin._candidates = None if self._candidates is None else self._candidates.fork()
        return twin

    def _masses(self, call: AttentionCall, cached: int) -> tuple[Block, Tensor, Tensor | None, int | Tensor]:
        """Return logits, estimates, the candidates `[rows, G, P]` if there are any, and the values read."""
        block = Block(call, cached, self.page_size)
        estimate = block.exact if self._summaries is None else block.estimate(self._summaries)
        if self._candidates is None or call.layer in self.policy.dense_layers:
            return block, estimate, None, self._values(call, block.geometry.rows.n_pages.sum())
        allowed, values = self._candidates.heads(call, cached, block)
        values = values + self._values(call, allowed.any(1).sum())
        return block, estimate.masked_fill(~allowed, -torch.inf), allowed, values

    def _values(self, call: AttentionCall, pages: Tensor) -> int | Tensor:
        """Values read for the estimates of so many pages, and for what stands in for them."""
        policy, head_dim = self.policy, call.key.shape[-1]
        if call.layer in policy.dense_layers:
            return 0
        own = policy.estimator.metadata_values(head_dim, self.page_size) if _estimates(policy) else 0
        return pages * (own + (head_dim if policy.compensate else 0))


def _estimates(policy: Policy) -> bool:
    """Whether a policy needs its estimates, to choose or to stand in for what it drops."""
    return policy.budget.reads_shares or policy.compensate is not None


def choose(policy: Policy, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
    """Return the pages that a policy keeps, `[rows, P]` bool.

    Parameters
    ----------
    policy : Policy
    estimate : Tensor
        `[rows, G, P]`: log masses of the policy's estimator, minus infinity beyond a row.
    rows : Rows
        All KV heads of a layer, in one step after another.
    layer : int
        That of the rows.
    """
    if layer in policy.dense_layers:
        return rows.valid(estimate.shape[-1])
    if policy.granularity == "query_head":
        return by_query_head(policy, estimate, rows).any(1)
    return policy.budget.select(*shared(policy, estimate, rows))


def shared(policy: Policy, estimate: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Return the shares `[rows, P]` that choose lists of KV heads or layers, and the rows."""
    shares = group_shares(estimate)
    if policy.granularity != "layer":
        return shares, rows
    heads = int((rows.position == rows.position[0]).sum())
    mean = shares.unflatten(0, (-1, heads)).mean(1, keepdim=True).expand(-1, heads, -1).flatten(0, 1)
    # A list that all KV heads share rounds a fractional budget once.
    return mean, replace(rows, kv_head=torch.full_like(rows.kv_head, -1))


def by_query_head(policy: Policy, estimate: Tensor, rows: Rows) -> Tensor:
    """Return the pages that every query head keeps on its own, `[rows, G, P]` bool."""
    shares = estimate.softmax(-1)
    picked = [policy.budget.select(shares[:, head], rows) for head in range(shares.shape[1])]
    return torch.stack(picked, 1)
