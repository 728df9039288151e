"""How alike the pages of neighbours are, and what sharing a list among them would cost (paper, 2.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, register
from coverage_lab.analyses.lists import Lists, Tally, over_lists
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAGS = (1, 2, 4, 8, 16, 32)
GROUPS = (2, 4, 8, 16, 32)
STEPS, HEADS, LAYERS = "steps apart", "other KV heads of the layer", "the next layer, same KV head"
REUSED, TOGETHER = "a list for so many steps", "one list for so many queries"


@register("stability")
@dataclass(frozen=True, kw_only=True)
class Stability(Analysis):
    """Overlap of lists between steps, KV heads and layers, and the coverage of lists that are shared.

    The overlap is the part of a list's pages that its neighbour holds too. A list for r steps is made at
    every r-th step; those up to the next add the current page. One list for r queries (as of a block of
    speculative decoding) holds the union of what they choose. Distance 1 of both is the policy itself.
    Requests with fewer steps than a distance have no part in it.

    Parameters
    ----------
    policy : str
        What chooses the pages.
    target : float
        Exact mass below which a row counts as short.
    seed : int
        Of the bootstrap.
    """

    title = "how stable page lists are"
    source = "paper, 2.2.1 and 2.2.2"

    policy: str = "exact/coverage:0.95"
    target: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise CoverageLabError(f"--target {self.target:g} is not in (0, 1]")

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `what, distance, overlap, coverage, ci_low, ci_high, rows_below, reads`.

        The interval is of the overlap, or where a list is shared, of the coverage: the mean exact mass that
        rows keep. `rows_below` is the share of rows that keep less than the target, `reads` the pages read
        over those of the context.
        """
        count = len(trace.shards)
        overlap, coverage, below, reads = (Tally(count) for _ in range(4))
        last: _Found | None = None  # of the block before

        def work(lists: Lists) -> _Found:
            return _of_block(lists, self.target)

        for found in over_lists(trace, self.policy, work):
            if last is not None and last.request == found.request:
                # Columns of two blocks begin at pages of their own.
                base = min(last.first_page, found.first_page)
                pair = (
                    np.pad(layer, ((0, 0), (0, 0), (first_page - base, 0)))
                    for layer, first_page in ((found.first, found.first_page), (last.last, last.first_page))
                )
                found.overlaps.append((LAYERS, 1, *_overlap(*pair)))
            last = found
            for what, distance, shared, own in found.overlaps:
                overlap.add(found.request, (what, distance), shared, own)
            for what, distance, covered, kept, pages in found.sharing:
                coverage.add(found.request, (what, distance), covered)
                below.add(found.request, (what, distance), covered < self.target - 1e-6)
                reads.add(found.request, (what, distance), kept, pages)
        lines = []
        for key in sorted(overlap.groups(), key=_place) + sorted(coverage.groups(), key=_place):
            tally = overlap if key[0] in (STEPS, HEADS, LAYERS) else coverage
            lines.append(
                {
                    "what": key[0],
                    "distance": key[1],
                    "overlap": overlap.mean(key),
                    "coverage": coverage.mean(key),
                    **tally.interval(key, self.seed),
                    "rows_below": below.mean(key),
                    "reads": reads.mean(key),
                }
            )
        return pl.DataFrame(lines, infer_schema_length=None)

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colours = seaborn.color_palette("colorblind")
        for colour, (what, column, label) in zip(
            colours,
            (
                (STEPS, "overlap", "pages in the list so many steps before"),
                (REUSED, "coverage", "mass kept by a list for so many steps"),
                (TOGETHER, "reads", "read by one list for so many queries"),
            ),
            strict=False,
        ):
            own = table.filter(pl.col("what") == what)
            ax.plot(own["distance"], own[column], "o-", color=colour, label=label)
        ax.set_xscale("log", base=2)
        ticks = table["distance"].unique().sort().to_list()
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set(xlabel="steps", ylabel="of pages, mass or context", title=self.policy, ylim=(0, 1.02))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(frameon=False)
        seaborn.despine(ax=ax)
        return ax


@dataclass
class _Found:
    """Of one block; all arrays have a place for every row that counts.

    `overlaps`: what, distance, pages shared, pages of the list. `sharing`: what, distance, mass covered,
    pages kept, pages of the row.
    """

    request: int
    first_page: int
    first: np.ndarray
    last: np.ndarray
    overlaps: list[tuple[str, int, np.ndarray, np.ndarray]]
    sharing: list[tuple[str, int, np.ndarray, np.ndarray, np.ndarray]]


def _place(key: tuple[str, int]) -> tuple[int, int]:
    return (STEPS, HEADS, LAYERS, REUSED, TOGETHER).index(key[0]), key[1]


def _overlap(mine: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pages that both hold, and those of the first; beyond the narrower one are none of it."""
    width = min(mine.shape[-1], other.shape[-1])
    return (mine[..., :width] & other[..., :width]).sum(-1), mine.sum(-1)


def _of_block(lists: Lists, target: float) -> _Found:
    kept, steps, heads = lists.kept, lists.kept.shape[2], lists.kept.shape[1]
    overlaps = [(STEPS, lag, *_overlap(kept[:, :, lag:], kept[:, :, :-lag])) for lag in LAGS if lag < steps]
    for apart in range(1, heads):
        overlaps.append((HEADS, 1, *_overlap(kept, np.roll(kept, apart, 1))))
    if len(kept) > 1:
        overlaps.append((LAYERS, 1, *_overlap(kept[1:], kept[:-1])))
    current = lists.start + lists.n_pages - 1
    sharing = [(REUSED, 1, *_outcome(lists, kept))]
    for group in GROUPS:
        if group > steps:
            break
        made = kept[:, :, np.arange(steps) // group * group].copy()
        np.put_along_axis(made, current[..., None], True, 3)
        sharing.append((REUSED, group, *_outcome(lists, made)))
    sharing.append((TOGETHER, 1, *_outcome(lists, kept)))
    for group in GROUPS:
        if group > steps:
            break
        starts = np.arange(0, steps, group)
        union = np.logical_or.reduceat(kept, starts, axis=2)[:, :, np.arange(steps) // group]
        # A query reads no page that is yet to come.
        columns = np.arange(kept.shape[3])
        union &= columns <= current[..., None]
        sharing.append((TOGETHER, group, *_outcome(lists, union)))
    return _Found(lists.request, lists.first_page, kept[0], kept[-1], overlaps, sharing)


def _outcome(lists: Lists, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mass that lists cover, their pages, and the pages of the rows."""
    return np.where(kept, lists.exact, 0).sum(-1), kept.sum(-1), lists.n_pages
