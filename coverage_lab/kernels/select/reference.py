"""The coverage rule and its relatives in plain torch; the specification of the kernel.

Shares are turned into fixed point first (2**30 is one). Sums of integers do not depend on the order
of the terms, so sorting, bisection and any parallel reduction give the same set, on any device.
Rounding moves a share by at most 2**-31.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coverage_lab.pages import Rows

ONE = 1 << 30
_COLUMN_BITS = 16
_CLASS_BIT = 48
_COLUMN_MASK = (1 << _COLUMN_BITS) - 1
MAX_WIDTH = 1 << _COLUMN_BITS


@dataclass(frozen=True)
class Ranking:
    """The pages of each row in the order in which a nested rule takes them.

    Attributes
    ----------
    order : Tensor
        `[rows, width]` int64, columns: the forced pages, then the rest by falling share (ties: lower
        page index first), then padding.
    mass : Tensor
        `[rows, width]` int64, fixed-point share of each ranked page; padding has none.
    covered : Tensor
        `[rows, width]` int64, running sum of `mass`: what the first k + 1 pages cover.
    rows : Rows
        Geometry of the rows.
    n_forced : Tensor
        `[rows]` int64, how many of the first pages are always kept.
    """

    order: Tensor
    mass: Tensor
    covered: Tensor
    rows: Rows
    n_forced: Tensor


def fixed_point(shares: Tensor) -> Tensor:
    """Return shares in [0, 1] as int64 in units of 2**-30; NaN counts as no share."""
    return (shares.float() * ONE).nan_to_num_(0.0).round_().clamp_(0, ONE).long()


def rank(shares: Tensor, rows: Rows, forced: Tensor | None = None) -> Ranking:
    """Rank the pages of each row.

    Parameters
    ----------
    shares : Tensor
        `[rows, width]`, any float dtype; padding is ignored.
    rows : Rows
        Geometry of the rows.
    forced : Tensor, optional
        `[rows, width]` bool: pages that come first whatever their share; the sink and the current page
        by default.

    Returns
    -------
    Ranking
    """
    width = shares.shape[1]
    if width > MAX_WIDTH:
        raise ValueError(f"shares: {width} pages a row; at most {MAX_WIDTH} can be ranked")
    forced = rows.forced(width) if forced is None else forced
    valid = rows.valid(width)
    forced = forced & valid
    # One integer a page: forced, on merit or padding; then falling share; then column. Sorting it sorts all.
    mass = fixed_point(shares).masked_fill_(~valid, 0)
    key = ((ONE - mass) << _COLUMN_BITS).add_(torch.arange(width, device=shares.device))
    key = _sorted(key.add_((~valid).long().sub_(forced.long()) << _CLASS_BIT))
    mass = ONE - ((key >> _COLUMN_BITS) & (2 * ONE - 1))
    return Ranking(
        order=key & _COLUMN_MASK,
        mass=mass,
        covered=mass.cumsum(1),
        rows=rows,
        n_forced=forced.sum(1),
    )


def oracle_counts(shares: Tensor, rows: Rows, gammas: Tensor) -> Tensor:
    """Return the size of C*(gamma) of Eq. 1, `[rows, len(gammas)]` int64: no page is forced."""
    return coverage_counts(rank(shares, rows, torch.zeros_like(shares, dtype=torch.bool)), gammas)


def coverage_counts(ranking: Ranking, gammas: Tensor) -> Tensor:
    """Return how many ranked pages the coverage rule keeps, by sorting.

    Parameters
    ----------
    ranking : Ranking
        Pages ranked by estimated share.
    gammas : Tensor
        `[J]` float64 in (0, 1]. At 1 every page is kept.

    Returns
    -------
    Tensor
        `[rows, J]` int64.
    """
    need = _needed(ranking.covered[:, -1:], gammas[None, :])
    counts = torch.searchsorted(ranking.covered, need) + 1
    counts = counts.maximum(ranking.n_forced[:, None])
    n_pages = ranking.rows.n_pages[:, None]
    return torch.where(gammas[None, :] >= 1, n_pages, counts.minimum(n_pages))


def coverage_bisection(shares: Tensor, rows: Rows, gamma: float, thresholds: int = 8) -> Tensor:
    """Return the set of the coverage rule by the search of Algorithm 1, without sorting.

    Each pass sums the mass above `thresholds` (the paper's K_B) evenly spaced values and keeps the
    interval that holds the cut. On fixed-point shares the search ends at the exact cut after at most
    `31 / log2(K_B)` passes; pages that tie at the cut are taken by lower page index until gamma is met.

    Parameters
    ----------
    shares : Tensor
        `[rows, width]`.
    rows : Rows
        Geometry of the rows.
    gamma : float
        Coverage in (0, 1].
    thresholds : int
        Thresholds per pass, a power of two from 2 on.

    Returns
    -------
    Tensor
        `[rows, width]` bool.
    """
    width = shares.shape[1]
    valid, forced = rows.valid(width), rows.forced(width)
    if gamma >= 1:
        return valid
    mass = fixed_point(shares).where(valid, 0)
    others = mass.where(valid & ~forced, -1)
    total = mass.sum(1, keepdim=True)
    target = _needed(total, torch.tensor(gamma, dtype=torch.float64)) - mass.where(forced, 0).sum(
        1, keepdim=True
    )

    # Invariant: the mass at or above `low` reaches the target, the mass at or above `high` does not.
    low = torch.zeros_like(target)
    high = others.amax(1, keepdim=True).clamp(min=0) + 1
    steps = torch.arange(thresholds, device=shares.device)
    for _ in range(math.ceil(31 / math.log2(thresholds))):
        tried = low + (high - low) * steps // thresholds  # [rows, K_B]
        above = torch.stack(
            [others.where(others >= tried[:, k : k + 1], 0).sum(1) for k in range(thresholds)], dim=1
        )
        reaches = above >= target
        last = reaches.sum(1, keepdim=True).clamp(min=1) - 1
        following = torch.cat([tried, high], 1).gather(1, last + 1)
        low, high = tried.gather(1, last), following

    over = others >= high
    missing = target - others.where(over, 0).sum(1, keepdim=True)
    tied = others == low
    # The tied pages before one, in page order, cover this much already.
    before = (tied.cumsum(1) - 1) * low
    keep = over | (tied & (before < missing))
    return ((keep & (target > 0)) | forced) & valid


def take(ranking: Ranking, counts: Tensor) -> Tensor:
    """Return `[rows, width]` bool: the first `counts` (`[rows]`) ranked pages of each row."""
    width = ranking.order.shape[1]
    first = torch.arange(width, device=counts.device) < counts[:, None]
    return torch.zeros_like(first).scatter_(1, ranking.order, first)


def _needed(total: Tensor, gamma: Tensor) -> Tensor:
    # The smallest integer sum that is at least gamma of the total.
    return (total.double() * gamma).ceil().long()


def _sorted(key: Tensor) -> Tensor:
    # NumPy's sort of int64 is vectorised, and several times faster than torch's on a CPU.
    if key.device.type == "cpu":
        return torch.from_numpy(np.sort(key.numpy(), axis=1))
    return key.sort(dim=1).values
