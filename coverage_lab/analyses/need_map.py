"""How much of the context rows need, by layer, KV head, task, context length or step (paper, Fig. 1a)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, register
from coverage_lab.analyses.needs import means, needed, quarters
from coverage_lab.registry import unknown
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# "Only 9% in several others" (2.2.1).
PAPER_GAMMA, PAPER_LEAST = 0.95, 0.09
LABELS = {"context": "prompt, tokens"}
GROUPS = ("kv_head", "layer", "task", "context", "step")


@register("need-map")
@dataclass(frozen=True, kw_only=True)
class NeedMap(Analysis):
    """Mean size of the oracle set over the context.

    Parameters
    ----------
    gamma : float
        Coverage of the oracle set; one of those recorded.
    by : {"kv_head", "layer", "task", "context", "step"}
        What rows are grouped by: KV heads of every layer, layers, tasks, quarters of the requests by prompt
        length, or quarters of the steps.
    seed : int
        Of the bootstrap.
    """

    title = "how much of the context rows need"
    source = "paper, Fig. 1a and 2.2.1"

    gamma: float = 0.95
    by: str = "kv_head"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in GROUPS:
            raise unknown("group", self.by, list(GROUPS))

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return the groups, then `fraction, ci_low, ci_high, rows, requests`."""
        rows = needed(trace, self.gamma)
        if self.by == "context":
            rows = _cut(rows, "prompt_tokens", trace.requests["prompt_tokens"].to_numpy(), "context")
        elif self.by == "step":
            steps = rows.select(pl.col("step").unique()).collect(engine="streaming")["step"].to_numpy()
            rows = _cut(rows, "step", steps, "steps")
        names = {"kv_head": ["layer", "kv_head"], "step": ["steps"]}
        return means(rows, names.get(self.by, [self.by]), "fraction", self.seed)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        if self.by != "layer" or self.gamma != PAPER_GAMMA:
            return []
        least = table.sort("fraction", "layer").row(0, named=True)
        return [
            Finding(
                "mean fraction, least needing layer",
                least["fraction"],
                PAPER_LEAST,
                least["ci_low"],
                least["ci_high"],
                note=f"layer {least['layer']}",
            )
        ]

    def figure(self, table: pl.DataFrame) -> Figure:
        if "kv_head" not in table.columns:
            import matplotlib.pyplot as plt

            height = max(3.0, 0.2 * table.height + 1)
            drawn, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
            self.plot(table, ax)
            return drawn
        from coverage_lab.analyses import variation

        return variation.figure(table, f"Mean size of C*({self.gamma:g})")

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        if "kv_head" in table.columns:
            from coverage_lab.analyses import variation

            return variation.plot(table, ax, f"Mean size of C*({self.gamma:g})")
        group = table.columns[0]
        names = [str(value) for value in table[group]]
        places = np.arange(len(names))
        # One request has no interval, and then nothing is drawn.
        ax.hlines(places, table["ci_low"], table["ci_high"], color="0.6", lw=2)
        ax.plot(table["fraction"], places, "o", color=seaborn.color_palette("colorblind")[0])
        ax.set_yticks(places, names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlim(left=0)
        ax.set(
            xlabel="pages needed, of the context",
            ylabel=LABELS.get(group, group),
            title=f"Mean size of C*({self.gamma:g})",
        )
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
        seaborn.despine(ax=ax)
        return ax


def _cut(rows: pl.LazyFrame, column: str, values: np.ndarray, name: str) -> pl.LazyFrame:
    """Add a column with the quarter that a whole number lies in, as text from the least to the largest."""
    edges = np.floor(quarters(values)).astype(int)
    starts = [edges[0], *(edges[1:-1] + 1)]
    ends = edges[1:] if len(edges) > 1 else edges
    width = len(str(edges[-1]))
    labels = [f"{start:{width}} to {end:{width}}" for start, end in zip(starts, ends, strict=True)]
    # The place of a value among the groups: how many of their ends it lies beyond.
    place = pl.sum_horizontal([pl.lit(0), *((pl.col(column) > end).cast(pl.Int32) for end in ends[:-1])])
    return rows.with_columns(
        place.replace_strict(dict(enumerate(labels)), return_dtype=pl.String).alias(name)
    )
