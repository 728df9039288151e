"""How the need depends on the size of a page, from one trace of small pages (paper, 5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, register
from coverage_lab.analyses.lists import Lists, Tally, over_lists
from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import check_page_size
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@register("page-size")
@dataclass(frozen=True, kw_only=True)
class PageSize(Analysis):
    """Tokens of C*(gamma) over the context, for pages of the trace's size and of powers of two of it.

    The share of a larger page is the sum of its parts', so that one trace of small pages serves for all:
    record it with `--page-size 16` to see 16 to 128.

    Parameters
    ----------
    gamma : float
        Coverage of the oracle set.
    largest : int
        Tokens of the largest page.
    seed : int
        Of the bootstrap.
    """

    title = "what pages of other sizes would read"
    source = "paper, 5.4: pages of 64 tokens"

    gamma: float = 0.95
    largest: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gamma < 1:
            raise CoverageLabError(f"--gamma {self.gamma:g} is not between 0 and 1")
        check_page_size(self.largest)

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `page_size, pages, fraction, ci_low, ci_high, over_smallest, summaries, requests`.

        `pages` is the mean size of the oracle set, `fraction` the part of the context in it (counted in the
        trace's pages, each row alike); `summaries` what an estimator of two vectors a page (mvar) reads
        besides, over the keys and values of the context.

        Raises
        ------
        CoverageLabError
            If the trace's pages are as large as the largest, or larger.
        """
        if trace.page_size >= self.largest:
            raise CoverageLabError(
                f"{trace.path} has pages of {trace.page_size} tokens, and --largest is {self.largest}; "
                "collect with a smaller --page-size, 16 for example"
            )
        sizes = [trace.page_size]
        while sizes[-1] * 2 <= self.largest:
            sizes.append(sizes[-1] * 2)
        pages, tokens = Tally(len(trace.shards)), Tally(len(trace.shards))

        def work(lists: Lists) -> tuple[int, dict[int, tuple[np.ndarray, np.ndarray]]]:
            return lists.request, {size: _needed(lists, trace.page_size, size, self.gamma) for size in sizes}

        for request, found in over_lists(trace, "exact/coverage:1", work):
            for size, (count, fraction) in found.items():
                pages.add(request, (size,), count)
                tokens.add(request, (size,), fraction)
        smallest = tokens.mean((sizes[0],)) or np.nan
        return pl.DataFrame(
            [
                {
                    "page_size": size,
                    "pages": pages.mean((size,)),
                    "fraction": tokens.mean((size,)),
                    **tokens.interval((size,), self.seed),
                    "over_smallest": (tokens.mean((size,)) or np.nan) / smallest,
                    "summaries": 1 / size,
                    "requests": tokens.requests((size,)),
                }
                for size in sizes
            ]
        )

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colours = seaborn.color_palette("colorblind")
        places = np.arange(table.height)
        ax.bar(places, table["fraction"], color=colours[0], label=f"C*({self.gamma:g})")
        ax.bar(places, table["summaries"], bottom=table["fraction"], color=colours[1], label="summaries")
        ax.vlines(places, table["ci_low"], table["ci_high"], color="0.2", lw=1.5)
        ax.set_xticks(places, [str(size) for size in table["page_size"]])
        ax.set(xlabel="tokens a page", ylabel="read, of the context", title="Reads by page size")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(frameon=False)
        seaborn.despine(ax=ax)
        return ax


def _needed(lists: Lists, recorded: int, size: int, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the pages of C*(gamma) at a page size, and the part of the context in them, `[rows]`."""
    factor = size // recorded
    # Pages keep absolute numbers: a larger page holds those from a multiple of the factor on.
    ahead = lists.first_page % factor
    shares = lists.exact.reshape(-1, lists.exact.shape[-1])
    width = -(-(ahead + shares.shape[1]) // factor) * factor
    padded = np.zeros((len(shares), width), np.float32)
    padded[:, ahead : ahead + shares.shape[1]] = shares
    larger = padded.reshape(len(shares), -1, factor).sum(-1)
    order = np.argsort(-larger, axis=1, kind="stable")
    ranked = np.take_along_axis(larger, order, 1).cumsum(1, dtype=np.float64)
    # Shares are rounded to float16: a hair below gamma is enough.
    enough = gamma * ranked[:, -1:] - 1e-6
    count = (ranked < enough).sum(1) + 1
    # Small pages in the set: all pages of the row that lie in its large ones.
    chosen = np.zeros_like(larger, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(larger.shape[1]) < count[:, None], 1)
    start = ahead + lists.start.reshape(-1, 1)
    place = np.arange(width)
    mine = (place >= start) & (place < start + lists.n_pages.reshape(-1, 1))
    small = (np.repeat(chosen, factor, 1) & mine).sum(1)
    return count, small / lists.n_pages.ravel()
