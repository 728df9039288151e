"""Which pages a policy keeps in one decode step of one layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import Policy


def rows_of(layer: int, kv_heads: int, position: int, pages: range, page_size: int, device: object) -> Rows:
    """Return the geometry of one step's rows, one a KV head; `pages` are those that the query sees."""
    heads = torch.arange(kv_heads, device=device)  # type: ignore[call-overload]
    same = torch.ones_like(heads)
    return Rows(
        n_pages=len(pages) * same,
        first_page=pages.start * same,
        position=position * same,
        layer=layer * same,
        kv_head=heads,
        page_size=page_size,
    )


def choose(policy: Policy, estimate: Tensor, rows: Rows) -> Tensor:
    """Return the pages that a policy keeps in one step, `[KV heads, P]` bool.

    Parameters
    ----------
    policy : Policy
    estimate : Tensor
        `[KV heads, G, P]`: log masses of the policy's estimator.
    rows : Rows
        One row a KV head.
    """
    if int(rows.layer[0]) in policy.dense_layers:
        return torch.ones(estimate.shape[0], estimate.shape[2], dtype=torch.bool, device=estimate.device)
    if policy.granularity == "query_head":
        shares = estimate.softmax(-1)
        picked = [policy.budget.select(shares[:, head], rows) for head in range(shares.shape[1])]
        return torch.stack(picked).any(0)
    if policy.granularity == "layer":
        shares = group_shares(estimate).mean(0, keepdim=True).expand(len(estimate), -1)
        # A list that all KV heads share rounds a fractional budget once.
        return policy.budget.select(shares, replace(rows, kv_head=torch.full_like(rows.kv_head, -1)))
    return policy.budget.select(group_shares(estimate), rows)
