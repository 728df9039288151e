"""The coverage rule and its relatives in plain torch; the specification of the kernel.

Shares are turned into fixed point first (2**30 is one). Sums of integers do not depend on the order
of the terms, so sorting, bisection and any parallel reduction give the same set, on any device.
Rounding moves a float32 share by at most 2**-31, half a unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import Rows

ONE = 1 << 30
_COLUMN_BITS = 16
MAX_WIDTH = 1 << _COLUMN_BITS
# Beyond any key made of a share and a column.
_CLASS = 1 << 48


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
    """Return shares in [0, 1], taken in float32, as int64 in units of 2**-30; NaN counts as no share."""
    return (shares.float() * ONE).nan_to_num_(0.0).round_().clamp_(0, ONE).long()


def rank(shares: Tensor, rows: Rows, sink: int | None = 1, local: int = 1) -> Ranking:
    """Rank the pages of each row.

    Parameters
    ----------
    shares : Tensor
        `[rows, width]`, any float dtype; padding is ignored.
    rows : Rows
        Geometry of the rows.
    sink, local : int, optional
        The first `sink` pages of the request and the last `local` ones, the current page among them, come
        first whatever their share; with a sink of None no page does.

    Returns
    -------
    Ranking
    """
    width = shares.shape[1]
    if width > MAX_WIDTH:
        raise CoverageLabError(f"a row of {width} pages; at most {MAX_WIDTH} can be ranked: use larger pages")
    # One integer a page: forced, on merit or padding; then falling share; then column. Sorting it sorts all.
    columns = torch.arange(width, device=shares.device)
    key = fixed_point(shares).mul_(-1 << _COLUMN_BITS).add_(columns)
    # From the sink to the shortest row's local pages all pages are on merit.
    fewest = int(rows.n_pages.min()) if rows.fewest is None else rows.fewest
    merit = range(min(sink or 0, width), max(sink or 0, fewest - local))
    for part in (range(merit.start), range(merit.stop, width)):
        keys = key[:, part.start : part.stop]
        if sink is not None:
            keys -= rows.forced(part, sink, local).long() * _CLASS
        keys.copy_(keys.where(rows.valid(part), columns[part.start : part.stop] + _CLASS))
    _sort(key)
    mass = (key >> _COLUMN_BITS).neg_().bitwise_and_((_CLASS >> _COLUMN_BITS) - 1)
    return Ranking(
        order=key.bitwise_and_(MAX_WIDTH - 1),
        mass=mass,
        covered=mass.cumsum(1),
        rows=rows,
        n_forced=torch.zeros_like(rows.n_pages) if sink is None else rows.n_forced(sink, local),
    )


def oracle_counts(shares: Tensor, rows: Rows, gammas: Tensor) -> Tensor:
    """Return the size of C*(gamma) of Eq. 1, `[rows, len(gammas)]` int64: no page is forced."""
    return coverage_counts(rank(shares, rows, sink=None), gammas)


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


def fixed_counts(ranking: Ranking, count: int | Tensor) -> Tensor:
    """Return how many ranked pages the fixed-count mode keeps, `[rows]` int64 (paper 3.5).

    Exactly `count`, which may be `[rows]`, or all where there are fewer; the forced pages are always among
    them.
    """
    n_pages = ranking.rows.n_pages
    return n_pages.minimum(torch.as_tensor(count, device=n_pages.device)).maximum(
        ranking.n_forced.minimum(n_pages)
    )


def thresholds_of(width: int) -> int:
    """Return the paper's K_B, thresholds a pass, for rows of so many pages (section 3.3)."""
    return 8 if width < 256 else 4 if width < 1024 else 2


def coverage_bisection(shares: Tensor, rows: Rows, gamma: float, thresholds: int | None = None) -> Tensor:
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
    thresholds : int, optional
        Thresholds per pass, a power of two from 2 on; the paper's for this width by default.

    Returns
    -------
    Tensor
        `[rows, width]` bool.
    """
    width = shares.shape[1]
    thresholds = thresholds_of(width) if thresholds is None else thresholds
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
    return keep | forced


def take(ranking: Ranking, counts: Tensor) -> Tensor:
    """Return `[rows, width]` bool: the first `counts` (`[rows]`) ranked pages of each row."""
    width = ranking.order.shape[1]
    first = torch.arange(width, device=counts.device) < counts[:, None]
    return torch.zeros_like(first).scatter_(1, ranking.order, first)


def _needed(total: Tensor, gamma: Tensor) -> Tensor:
    # The smallest integer sum that is at least gamma of the total, a product rounded to float64:
    # 0.4 is a hair above 2 / 5 there, and two of five equal pages are enough.
    return (total.double() * gamma).ceil().long()


def _sort(key: Tensor) -> None:
    # NumPy's sort of int64 is vectorised, and several times faster than torch's on a CPU.
    if key.device.type == "cpu":
        key.numpy().sort(axis=1)
    else:
        key.copy_(key.sort(dim=1).values)
