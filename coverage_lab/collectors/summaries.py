"""Summaries of the full pages of a request, kept up as pages fill."""

from __future__ import annotations

import torch
from torch import Tensor

from coverage_lab.policies.estimators import Estimator, Summary


class PageSummaries:
    """What an estimator keeps of the full pages of one request, layer by layer.

    Parameters
    ----------
    estimator : Estimator
    page_size : int
        Tokens a page.
    dtype : torch.dtype, optional
        Round what is kept to it, as a serving system would; it stays float32 by default.
    """

    def __init__(self, estimator: Estimator, page_size: int, dtype: torch.dtype | None = None) -> None:
        self.estimator, self.page_size, self.dtype = estimator, page_size, dtype
        self._held: dict[int, Summary] = {}

    def extend(self, layer: int, keys: Tensor, oldest: int) -> None:
        """Summarise the pages that have filled since the last call.

        Parameters
        ----------
        layer : int
        keys : Tensor
            `[KV heads, T, D]`, those in the cache.
        oldest : int
            Token of the first of them.
        """
        held = self._held.get(layer)
        done = 0 if held is None else held.n_pages
        full = (oldest + keys.shape[1]) // self.page_size
        if full <= done:
            return
        start, stop = done * self.page_size - oldest, full * self.page_size - oldest
        filled = keys[:, start:stop].float().unflatten(1, (full - done, self.page_size))
        new = self.estimator.summarize(filled)
        if self.dtype is not None:
            new = new.rounded(self.dtype)
        self._held[layer] = new if held is None else held.append(new)

    def pages(self, layer: int, start: int, stop: int) -> Summary | None:
        """Return the summary of pages `start` to `stop - 1` of a layer; None where that is no page."""
        return self._held[layer].pages(start, stop) if stop > start else None

    def fork(self) -> PageSummaries:
        """Return summaries that hold the same and go on by themselves."""
        twin = PageSummaries(self.estimator, self.page_size, self.dtype)
        twin._held = dict(self._held)
        return twin
