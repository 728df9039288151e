"""How kernels divide ragged page lists among thread blocks, without a GPU (paper 2.2.2, Fig. 2)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Colours of pages that a list holds, and of others that are read.
READ = "#0173b2"
PADDING = "tab:red"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the schemes know of the device.

    Attributes
    ----------
    multiprocessors : int
        132 on an H100 or H200.
    resident : int
        Thread blocks that a multiprocessor runs at a time.
    page_size : int
        Tokens a page.
    """

    multiprocessors: int = 132
    resident: int = 2
    page_size: int = 64

    @property
    def slots(self) -> int:
        """Thread blocks that run at a time."""
        return self.multiprocessors * self.resident


@dataclass(frozen=True)
class Blocks:
    """The work of every thread block, in the order in which they start.

    Attributes
    ----------
    row : ndarray
        `[parts]`: the list that a part belongs to; a block that reads of several lists has a part of each.
    block : ndarray
        `[parts]`: the block that does it.
    selected, padding : ndarray
        `[parts]`: pages of the list, and pages that it does not hold, that the block reads.
    """

    row: np.ndarray
    block: np.ndarray
    selected: np.ndarray
    padding: np.ndarray

    def work(self) -> np.ndarray:
        """Return the pages that each block reads."""
        return np.bincount(self.block, self.selected + self.padding).astype(np.int64)


@dataclass(frozen=True)
class Scheme:
    """A way to divide the work.

    Attributes
    ----------
    title : str
    host : bool
        Whether the host must know the lengths of each step.
    divide : callable
        From list lengths `[rows]` and the device to blocks.
    resident : int, optional
        Blocks that a multiprocessor runs at a time, where the kernel is known to leave no choice.
    """

    title: str
    host: bool
    divide: Callable[[np.ndarray, Gpu], Blocks]
    resident: int | None = None

    def slots(self, gpu: Gpu) -> int:
        """Return how many blocks run at a time."""
        return gpu.multiprocessors * (self.resident or gpu.resident)


def chunked(counts: np.ndarray, chunks: np.ndarray, read: np.ndarray | None = None) -> Blocks:
    """Cut every list into chunks of its own size, a block each.

    Parameters
    ----------
    counts : ndarray
        `[rows]`: pages of each list.
    chunks : ndarray
        `[rows]`: pages of a chunk.
    read : ndarray, optional
        `[rows]`: pages that are read in place of the list's; what is beyond the list is padding.
    """
    read = counts if read is None else read
    numbers = -(-read // chunks)
    row = np.repeat(np.arange(len(counts)), numbers)
    start = (np.arange(len(row)) - np.repeat(numbers.cumsum() - numbers, numbers)) * chunks[row]
    stop = np.minimum(start + chunks[row], read[row])
    selected = np.clip(np.minimum(stop, counts[row]) - start, 0, None)
    return Blocks(row, np.arange(len(row)), selected, stop - start - selected)


def fitting_chunk(read: np.ndarray, blocks: int, least: int) -> np.ndarray:
    """Return the least chunk, for every list, with which no more than so many blocks are needed, `[rows]`."""
    low, high = max(1, least), int(read.max())
    while low < high:
        middle = (low + high) // 2
        if np.sum(-(-read // middle)) > blocks:
            low = middle + 1
        else:
            high = middle
    return np.full_like(read, low)


def rectangular(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """As many blocks for every list as the longest needs, and as many pages."""
    longest = np.full_like(counts, counts.max())
    return chunked(counts, fitting_chunk(longest, gpu.slots, 1), longest)


def buckets(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """A grid for each power of two, which its lists are filled up to."""
    read = 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
    order = np.argsort(read, kind="stable")
    found = chunked(counts[order], fitting_chunk(read, gpu.slots, 1), read[order])
    return Blocks(order[found.row], found.block, found.selected, found.padding)


def fa3_splits(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """FlashAttention-3's dynamic splits: a list has a split for each multiprocessor's share that it holds.

    The share is the work over the multiprocessors, a tenth more; tiles have 128 tokens. All splits of a list
    are of one size.
    """
    tile = max(1, 128 // gpu.page_size)
    tiles = -(-counts // tile)
    share = max(1, int(np.ceil(np.float32(tiles.sum()) * np.float32(1.1) / np.float32(gpu.multiprocessors))))
    splits = np.clip(-(-tiles // share), 1, 128)
    return chunked(counts, tile * -(-tiles // splits))


def flashinfer_plan(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """FlashInfer's plan: the least chunk, of 128 tokens at least, whose chunks all run at once."""
    return chunked(counts, fitting_chunk(counts, 2 * gpu.multiprocessors, 128 // gpu.page_size))


def self_planning(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """The paper's Eq. 4: a fixed number of blocks a list, chunks of 24 pages at least."""
    blocks = max(32, -(-4096 // len(counts)))
    return chunked(counts, np.maximum(24, -(-counts // blocks)))


def even_split(counts: np.ndarray, gpu: Gpu) -> Blocks:
    """This project's kernel: all lists end to end, cut into equal parts, one for each block that runs."""
    ends = counts.cumsum()
    share = max(4, -(-int(ends[-1]) // gpu.slots))  # LEAST_PAGES of kernels/ragged.py
    cuts = np.union1d(ends, np.arange(share, ends[-1] + share, share).clip(max=ends[-1]))
    starts = np.concatenate([[0], cuts[:-1]])
    row = np.searchsorted(ends, starts, side="right")
    return Blocks(row, starts // share, cuts - starts, np.zeros_like(starts))


SCHEMES = {
    "rectangular": Scheme("rectangular grid", False, rectangular),
    "buckets": Scheme("buckets of powers of two", True, buckets),
    "fa3": Scheme("FA3 splits", False, fa3_splits, resident=1),
    "flashinfer": Scheme("FlashInfer plan", True, flashinfer_plan, resident=2),
    "self-planning": Scheme("self-planning (paper)", False, self_planning),
    "even": Scheme("even split (coverage-lab)", False, even_split),
}


def compute(counts: np.ndarray, gpu: Gpu | None = None) -> pl.DataFrame:
    """Return how each scheme divides the lists.

    Blocks start in their order as others end, and every page takes the same time: what is left out is that
    a busy memory, not the blocks, may be the limit, and the cost of a block and of merging.

    Parameters
    ----------
    counts : ndarray
        `[rows]`: pages of each list.
    gpu : Gpu, optional

    Returns
    -------
    DataFrame
        `scheme, title, host, blocks, reads, most, over_even`: thread blocks, pages read over those selected,
        the pages of the block that reads most, and the time until the last block ends over that of all
        selected pages divided evenly. `host` says whether the host must know the lengths.
    """
    gpu = gpu or Gpu()
    counts = np.asarray(counts, np.int64).ravel()
    if not counts.size or counts.min() < 1:
        raise CoverageLabError("lists of at least one page are needed")
    lines = []
    for name, scheme in SCHEMES.items():
        blocks = scheme.divide(counts, gpu)
        work, slots = blocks.work(), scheme.slots(gpu)
        lines.append(
            {
                "scheme": name,
                "title": scheme.title,
                "host": scheme.host,
                "blocks": len(work),
                "reads": float(work.sum() / counts.sum()),
                "most": int(work.max()),
                "over_even": makespan(work, slots) * slots / float(counts.sum()),
            }
        )
    return pl.DataFrame(lines)


def makespan(work: Sequence[int] | np.ndarray, slots: int) -> int:
    """Return when the last block ends, if each starts in order where one ends first; unit: a page's time."""
    free = [0] * slots
    for pages in work:
        heapq.heapreplace(free, free[0] + int(pages))
    return max(free)


def plot(
    counts: np.ndarray, scheme: str, ax: Axes | None = None, gpu: Gpu | None = None, bars: int = 12
) -> Axes:
    """Draw some lists as bars, a segment for each thread block, padding in red (Fig. 2).

    Parameters
    ----------
    counts : ndarray
        `[rows]`: pages of each list.
    scheme : str
        One of `SCHEMES`.
    ax : Axes, optional
        Where to draw; the current axes by default.
    gpu : Gpu, optional
    bars : int
        Lists that are drawn, from the shortest to the longest.
    """
    import matplotlib.pyplot as plt
    import seaborn

    ax = ax or plt.gca()
    counts = np.asarray(counts, np.int64).ravel()
    blocks = SCHEMES[scheme].divide(counts, gpu or Gpu())
    order = np.argsort(counts, kind="stable")
    shown = order[np.unique(np.linspace(0, len(counts) - 1, bars).round().astype(int))]
    for place, row in enumerate(shown):
        bottom = 0
        for part in np.flatnonzero(blocks.row == row):
            for height, fill in ((blocks.selected[part], READ), (blocks.padding[part], PADDING)):
                if height:
                    ax.bar(place, height, 0.8, bottom, color=fill, edgecolor="white", linewidth=0.6)
                    bottom += height
    ax.set_xticks([])
    ax.set(xlabel="lists, shortest to longest", title=SCHEMES[scheme].title)
    seaborn.despine(ax=ax)
    return ax


def figure(counts: np.ndarray, gpu: Gpu | None = None) -> Figure:
    """Draw every scheme side by side on the same lists."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    size = 2.9 * len(SCHEMES) + 1.8, 3.4
    drawn, axes = plt.subplots(1, len(SCHEMES), figsize=size, sharey=True, layout="constrained")
    for scheme, ax in zip(SCHEMES, axes, strict=True):
        plot(counts, scheme, ax, gpu)
    axes[0].set_ylabel("pages; a segment is a thread block")
    handles = [Patch(color=READ, label="selected"), Patch(color=PADDING, label="read, though not selected")]
    drawn.legend(handles=handles, frameon=False, loc="outside right center")
    return drawn
