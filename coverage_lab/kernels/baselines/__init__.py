"""Attention kernels to compare with, on the same keys, values and page lists. One file each.

What is not installed or does not run here says so (`missing`), and is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from coverage_lab.kernels.cache import PagedCache
from coverage_lab.registry import Registry

baselines: Registry[Baseline] = Registry("baseline", __name__)


class Baseline(ABC):
    """One attention kernel on one layer's keys and values.

    Parameters
    ----------
    query : Tensor
        `[B, query heads, D]`, not scaled.
    cache : PagedCache
    pages : Tensor
        `[B, KV heads, width]` int32 page lists in ascending order, the current page last.
    counts : Tensor
        `[B, KV heads]` int32.
    scale : float
        Softmax scale.

    Attributes
    ----------
    pages, counts : Tensor
        The lists that this kernel attends to: those given, or what it makes of them. All pages of a
        dense kernel, more than the given ones where it pads.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    dense: ClassVar[bool] = False  # reads every page, whatever the lists are

    def __init__(self, query: Tensor, cache: PagedCache, pages: Tensor, counts: Tensor, scale: float) -> None:
        self.query, self.cache, self.pages, self.counts, self.scale = query, cache, pages, counts, scale
        self.prepare()

    @classmethod
    def missing(cls, cache: PagedCache) -> str | None:
        """Return why this kernel can't run here on such a cache, or None if it can."""
        return None

    @abstractmethod
    def prepare(self) -> None:
        """Lay out what does not change from step to step; not timed."""

    def plan(self) -> bool:
        """Do the host's work for new lists, which is timed apart; False if there is none."""
        return False

    @abstractmethod
    def run(self) -> Tensor:
        """Return `[B, query heads, D]`; what a CUDA graph would hold."""
