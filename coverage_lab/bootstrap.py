"""Percentile intervals by resampling requests, the independent unit of a trace."""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
LEVEL = 0.95


@lru_cache(maxsize=1)
def resample_weights(requests: int, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Return `[resamples, requests]`: how often each request is drawn in each resample; read-only."""
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(requests, np.full(requests, 1 / requests), size=resamples).astype(float)
    weights.flags.writeable = False
    return weights


def interval(values: ArrayLike) -> tuple[float, float]:
    """Return the central 95% interval of resampled values; NaN where there are none."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def ratio_interval(numerator: ArrayLike, denominator: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """Return the interval of `sum(numerator) / sum(denominator)` over requests.

    Parameters
    ----------
    numerator, denominator : array_like
        `[requests]` sums of each request. With one request there is no interval: NaN.
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    if len(top) < 2:
        return float("nan"), float("nan")
    weights = resample_weights(len(top), seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        return interval((weights @ top) / (weights @ bottom))
