"""Lengths of page lists: drawn with a given spread, or those of a recorded trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from coverage_lab.policies.policy import Policy
    from coverage_lab.trace import Trace

# The sink page and the current one.
LEAST = 2


class NoSuchLists(CoverageLabError):
    """No lists have the spread that was asked for."""


def drawn(rows: int, pages: int, kept: float, cv: float, seed: int) -> np.ndarray:
    """Return list lengths whose mean is `kept` of the pages and whose spread is `cv`.

    They follow a gamma distribution, cut to what a list can have. At one shape the total is the same for
    every spread. The spread of the result is `cv` within a hundredth, and within half a page of the mean
    more, since lists are whole pages.

    Parameters
    ----------
    rows, pages : int
        Lists, and pages of the context.
    kept : float
        Fraction of all pages, in (0, 1].
    cv : float
        Standard deviation over the mean.

    Returns
    -------
    ndarray
        `[rows]` int64, from 2 pages (or all, where there are fewer) to `pages`.

    Raises
    ------
    CoverageLabError
        If the fraction or the spread means nothing.
    NoSuchLists
        If lists of so few pages can't spread so much.
    """
    check_kept(kept)
    if not cv >= 0:
        raise CoverageLabError(f"CV {cv:g} is not a number from 0 on")
    least = min(LEAST, pages)
    total = int(np.clip(round(kept * rows * pages), rows * least, rows * pages))
    quantiles = (np.arange(rows) + 0.5) / rows

    def lengths(nominal: float) -> np.ndarray:
        shape = nominal**-2 if nominal > 0 else np.inf
        values = stats.gamma.ppf(quantiles, shape, scale=1 / shape) if nominal > 0 else np.ones(rows)
        return _scaled(values, least, pages, total)

    # Up to some width a wider distribution gives wider lists; beyond, most lists are as short as can be.
    widest = max(np.arange(0, 4.01, 0.1), key=lambda nominal: _cv(lengths(nominal)))
    low, high = 0.0, float(widest) if cv > 0 else 0.0
    for _ in range(40 if cv > 0 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if _cv(lengths(middle)) < cv else (low, middle)
    found = lengths(high)
    # Whole pages: short lists can't be as even, or as uneven, as any number asks.
    if abs(_cv(found) - cv) > 0.01 + 0.5 / found.mean():
        raise NoSuchLists(
            f"CV {cv:g}: {rows} lists of {least} to {pages} pages that keep {kept:g} of them reach "
            f"{_cv(lengths(widest)):.2f}; take a smaller CV or a longer context"
        )
    return np.random.default_rng(seed).permutation(found)


def check_kept(kept: float) -> None:
    """Raise CoverageLabError if this is no fraction of the pages."""
    if not 0 < kept <= 1:
        raise CoverageLabError(f"kept fraction {kept:g} is not in (0, 1]")


def _cv(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def _scaled(values: np.ndarray, least: int, most: int, total: int) -> np.ndarray:
    """Return whole numbers in proportion to `values`, within the bounds, that add up to `total`."""
    values = np.maximum(values, 1e-12)
    low, high = 0.0, most / values.min()
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(values * middle, least, most).sum() < total:
            low = middle
        else:
            high = middle
    exact = np.clip(values * high, least, most)
    found = np.floor(exact).astype(np.int64)
    # The rest goes to those that lost most by rounding down.
    for place in np.argsort(found - exact, kind="stable")[: total - found.sum()]:
        found[place] += found[place] < most
    return found


def of_trace(trace: Trace, policy: Policy, batch: int, kv_heads: int, pages: int, seed: int) -> np.ndarray:
    """Return list lengths `[batch, kv_heads]`: page counts of a trace as fractions of another context.

    These are the paper's "real" lists (section 5.5.3). Every request of the batch takes a (request, layer,
    step) of the trace, drawn at random; where the traced model has fewer KV heads than are asked for, the
    next ones come from the following layers of that step.
    """
    recorded = kept_fractions(trace, policy)
    generator = np.random.default_rng(seed)
    fractions = []
    for _ in range(batch):
        request = recorded[generator.integers(len(recorded))]
        layers, heads, steps = request.shape
        step, layer = generator.integers(steps), generator.integers(layers)
        following = [(layer + more) % layers for more in range(-(-kv_heads // heads))]
        fractions.append(request[following, :, step].reshape(-1)[:kv_heads])
    return np.clip(np.rint(np.stack(fractions) * pages), min(LEAST, pages), pages).astype(np.int64)


def kept_fractions(trace: Trace, policy: Policy) -> list[np.ndarray]:
    """Return the fraction of its pages that a policy keeps, `[layers, KV heads, steps]` for each request."""
    from coverage_lab.policies.evaluate import policy_counts

    heads = int(trace.geometry["kv_heads"])
    blocks: dict[int, list[np.ndarray]] = {}
    for request, layer, _, n_pages, kept in policy_counts(trace, [policy]):
        layers = len(np.unique(layer))
        fractions = (kept[:, 0] / n_pages).reshape(layers, heads, -1)
        blocks.setdefault(request, []).append(fractions)
    return [np.concatenate(parts) for parts in blocks.values()]
