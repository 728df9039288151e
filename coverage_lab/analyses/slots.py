"""Room for page lists that is sized from the step before (paper, 2.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, register
from coverage_lab.analyses.lists import Lists, Tally, over_lists
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_OVERFLOW = 0.024
PAPER_AT_ONE, PAPER_RESERVE = "40%", "1.77"
MARGINS = tuple(np.round(np.arange(1.0, 4.001, 0.05), 2).tolist())
SHOWN = (1.0, 1.25, 1.5, 2.0, 3.0)


@register("slots")
@dataclass(frozen=True, kw_only=True)
class Slots(Analysis):
    """Lists that overflow, and what is reserved, if a list gets `margin` times the pages of the step before.

    Parameters
    ----------
    policy : str
        What chooses the pages.
    overflow : float
        The margin is sought with which at most this share of the lists overflows, to 0.05.
    seed : int
        Of the bootstrap.
    """

    title = "slots sized from the step before"
    source = "paper, 2.2.2"

    policy: str = "mvar/coverage:0.98"
    overflow: float = PAPER_OVERFLOW
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.overflow < 1:
            raise CoverageLabError(f"--overflow {self.overflow:g} is not between 0 and 1")

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `margin, overflow, ci_low, ci_high, reserve, reserve_ci_low, reserve_ci_high, note, paper`.

        `overflow` is the share of the lists that need more than their slots, `reserve` the slots over the
        pages needed.

        Raises
        ------
        CoverageLabError
            If no request has two steps.
        """
        over, reserved = Tally(len(trace.shards)), Tally(len(trace.shards))
        for request, counts in over_lists(trace, self.policy, _counts):
            before, after = counts[..., :-1], counts[..., 1:]
            if not after.size:
                continue
            for margin in MARGINS:
                slots = np.ceil(margin * before)
                over.add(request, (margin,), after > slots)
                reserved.add(request, (margin,), slots, after)
        if not over.groups():
            raise CoverageLabError(
                f"{trace.path}: no request has two decode steps; collect more with --steps"
            )
        shares = {margin: over.mean((margin,)) or 0.0 for margin in MARGINS}
        enough = next((margin for margin in MARGINS if shares[margin] <= self.overflow), None)
        lines = []
        for margin in sorted({*SHOWN, *([] if enough is None else [enough])}):
            note, paper = "", None
            if margin == 1:
                paper = f"{PAPER_AT_ONE} overflow"
            if margin == enough:
                note = f"at most {self.overflow:.1%} overflow"
                if self.overflow == PAPER_OVERFLOW:
                    paper = f"reserves {PAPER_RESERVE}"
            ends = reserved.interval((margin,), self.seed)
            lines.append(
                {
                    "margin": margin,
                    "overflow": shares[margin],
                    **over.interval((margin,), self.seed),
                    "reserve": reserved.mean((margin,)),
                    **{f"reserve_{end}": value for end, value in ends.items()},
                    "note": note,
                    "paper": paper,
                }
            )
        return pl.DataFrame(lines, infer_schema_length=None)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        found = []
        for line in table.filter(pl.col("paper").is_not_null()).to_dicts():
            if line["margin"] == 1:
                what = "lists that overflow the pages of the step before"
                found.append(
                    Finding(what, line["overflow"], PAPER_AT_ONE, line["ci_low"], line["ci_high"], "share")
                )
            if line["note"]:
                what = f"slots over pages needed, {line['note']}"
                low, high = line["reserve_ci_low"], line["reserve_ci_high"]
                found.append(Finding(what, line["reserve"], PAPER_RESERVE, low, high))
        return found

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colour = seaborn.color_palette("colorblind")[0]
        ax.vlines(table["reserve"], table["ci_low"], table["ci_high"], color="0.6", lw=2)
        ax.plot(table["reserve"], table["overflow"], "o-", color=colour)
        for margin, overflow, reserve in table.select("margin", "overflow", "reserve").iter_rows():
            ax.annotate(f"x {margin:g}", (reserve, overflow), (6, 6), textcoords="offset points")
        ax.set(
            xlabel="slots reserved over pages needed",
            ylabel="lists that overflow",
            title=f"Slots from the step before, {self.policy}",
        )
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        seaborn.despine(ax=ax)
        return ax


def _counts(lists: Lists) -> tuple[int, np.ndarray]:
    return lists.request, lists.counts
