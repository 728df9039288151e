"""Measure profiles: page counts per layer or KV head, from one set of requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coverage_lab.policies.budgets.profiled import Profile
from coverage_lab.policies.evaluate import policy_counts
from coverage_lab.policies.policy import Policy
from coverage_lab.trace import Trace


@dataclass(frozen=True)
class GroupCounts:
    """How often each (layer, KV head) of a model had each page count.

    Attributes
    ----------
    histogram : ndarray
        `[layers, KV heads, pages + 1]`: rows by page count.
    fitted_on : dict
        Where the counts come from.
    """

    histogram: np.ndarray
    fitted_on: dict[str, Any]

    def mean(self, by: Literal["layer", "kv_head"]) -> Profile:
        """Return the mean count of every group (paper, 5.5.2)."""
        groups = self._groups(by)
        pages = np.arange(groups.shape[-1])
        with np.errstate(invalid="ignore"):
            return self._profile(by, (groups * pages).sum(-1) / groups.sum(-1))

    def quantile(self, q: float, by: Literal["layer", "kv_head"]) -> Profile:
        """Return the q-quantile of the counts of every group, interpolated between its rows."""
        groups = self._groups(by)
        rows = groups.sum(-1)
        place = q * np.maximum(rows - 1, 0)
        low = np.floor(place)
        high = np.minimum(low + 1, np.maximum(rows - 1, 0))
        ranked = groups.cumsum(-1)
        # The row of rank i has as many pages as there are counts that no more than i rows stay within.
        at_low, at_high = ((ranked <= rank[..., None]).sum(-1) for rank in (low, high))
        counts = at_low + (place - low) * (at_high - at_low)
        return self._profile(by, np.where(rows > 0, counts, np.nan))

    def _groups(self, by: str) -> np.ndarray:
        return self.histogram.sum(1, keepdims=True) if by == "layer" else self.histogram

    def _profile(self, by: Literal["layer", "kv_head"], counts: np.ndarray) -> Profile:
        layers = tuple(tuple(float(c) for c in layer if np.isfinite(c)) for layer in counts)
        return Profile(by, layers, self.fitted_on)


def group_counts(
    trace: Trace,
    policies: Collection[Policy],
    folds: int = 1,
    covering: float | None = None,
    progress: Callable[[int], None] = lambda request: None,
) -> dict[Policy, list[GroupCounts]]:
    """Count the pages that policies keep per (layer, KV head), in one pass.

    Parameters
    ----------
    trace : Trace
    policies : collection of Policy
        Of granularity kv_head.
    folds : int
        Request r goes into part `r % folds`.
    covering : float, optional
        Count the pages that a row must keep, in the policy's order, to keep this much of the exact
        mass, in place of those that the policy keeps.
    progress : callable
        Called with the place of every request that is done.

    Returns
    -------
    dict of Policy to list of GroupCounts
        One for each part.
    """
    first = trace.geometry["layers"]
    shape = (max(layer["layer"] for layer in first) + 1, int(trace.geometry["kv_heads"]), trace.max_pages + 1)
    counts = {policy: np.zeros((folds, *shape)) for policy in policies}
    for request, layer, kv_head, _, kept in policy_counts(trace, list(policies), covering, progress):
        for column, policy in enumerate(policies):
            np.add.at(counts[policy][request % folds], (layer, kv_head, kept[:, column]), 1)
    held = {"model": trace.manifest["run"]["model"]["model"], "page_size": trace.page_size}
    what = "kept by" if covering is None else f"needed for {covering:g} in the order of"
    return {
        policy: [
            GroupCounts(part, held | {"from": f"pages {what} {policy} on {trace.path.name}"})
            for part in parts
        ]
        for policy, parts in counts.items()
    }


def fit_profile(trace: Trace, policy: Policy, by: Literal["layer", "kv_head"]) -> Profile:
    """Return the mean page count of every layer or KV head under a policy, over all requests of a trace."""
    return group_counts(trace, [policy])[policy][0].mean(by)
