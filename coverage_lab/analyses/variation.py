"""How the needed budget varies over layers, KV heads, steps and requests (paper 2.2.1, Fig. 1a)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, beside_paper, register
from coverage_lab.analyses.lists import Tally
from coverage_lab.analyses.needs import recorded_column, steady
from coverage_lab.bootstrap import interval, resample_weights
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Llama-3.1-8B on 60 LongBench requests (paper 2.2.1).
PAPER_GAMMA = 0.95
TOTALS = "CV of totals over the context, across requests"
PAPER = {
    "CV across layers": "0.61",
    "CV across KV heads": "0.74",
    "CV across steps": "0.53",
    "CV of totals across KV heads": "0.13-0.18",
    "CV of totals across steps": "0.13-0.18",
    "CV of totals over the context, across requests": "0.13-0.18",
    "mean fraction of the context": "0.216",
    "mean fraction, first layer": "0.68",
}


@register("variation")
@dataclass(frozen=True, kw_only=True)
class Variation(Analysis):
    """Spread of the needed budget over layers, KV heads, steps and requests, beside the paper's.

    Parameters
    ----------
    gamma : float
        Coverage of the oracle set; one of those recorded.
    seed : int
        Of the bootstrap.
    """

    title = "how the need varies"
    source = "paper, 2.2.1"

    gamma: float = PAPER_GAMMA
    seed: int = 0

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return the table of `compute` below."""
        return compute(trace, self.gamma, self.seed)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        return beside_paper(table, "value", lambda line: line["quantity"])

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn

        ax = ax or plt.gca()
        places = np.arange(table.height)
        ax.hlines(places, table["ci_low"], table["ci_high"], color="0.6", lw=2)
        ax.plot(table["value"], places, "o", color=seaborn.color_palette("colorblind")[0], label="this trace")
        for place, paper in zip(places, table["paper"], strict=True):
            if paper is None:
                continue
            ends = [float(end) for end in paper.split("-")]
            label = "paper, Llama-3.1-8B" if place == 0 else None
            ax.plot(ends, [place + 0.22] * len(ends), "|-", color="0.2", ms=9, label=label)
        ax.set_yticks(places, table["quantity"].to_list())
        ax.invert_yaxis()
        ax.set(xlabel="CV, or fraction of the context", title=f"C*({self.gamma:g})", xlim=(0, None))
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
        ax.legend(frameon=False)
        seaborn.despine(ax=ax)
        return ax


def compute(trace: Trace, gamma: float = 0.95, seed: int = 0) -> pl.DataFrame:
    """Return how much the page count of C*(gamma) varies.

    The coefficient of variation (CV) is the population standard deviation over the mean, taken in
    every group and averaged over groups: across layers within one (request, KV head, step), across KV heads
    within one (request, layer, step), across steps within one (request, layer, KV head). Totals are
    sums over all layers; across requests they are fractions of the context, since contexts differ.

    Parameters
    ----------
    trace : Trace
        Recorded with `gamma` among its gammas.
    gamma : float
        Coverage of the oracle set.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    DataFrame
        `quantity, value, ci_low, ci_high, groups, requests, paper`; the interval is a bootstrap 95%
        interval over requests, NaN with one request. The paper's values are of gamma 0.95.
    """
    pages = pl.col("pages")
    spread = (pages.std(ddof=0) / pages.mean()).alias("value")
    fraction = (pages / pl.col("n_pages")).alias("value")
    found = Tally(len(trace.shards))
    # Groups lie within a request: memory does not grow with the trace.
    for place, rows in enumerate(_frames(trace, gamma)):
        totals = rows.group_by("kv_head", "step").agg(pages.sum(), pl.col("n_pages").sum())
        for quantity, frame, within in (
            ("CV across layers", rows, ["kv_head", "step"]),
            ("CV across KV heads", rows, ["layer", "step"]),
            ("CV across steps", rows, ["layer", "kv_head"]),
            ("CV of totals across KV heads", totals, ["step"]),
            ("CV of totals across steps", totals, ["kv_head"]),
        ):
            groups = frame.group_by(within).agg(spread, pl.len().alias("members"))
            found.add(place, (quantity,), groups.filter(pl.col("members") > 1)["value"].to_numpy())
        first = rows.filter(pl.col("layer") == pl.col("layer").min())
        for quantity, frame in (
            ("mean fraction of the context", rows),
            ("mean fraction, first layer", first),
            (TOTALS, totals),
        ):
            found.add(place, (quantity,), frame.select(fraction)["value"].to_numpy())
    lines = [
        _across_requests(found, seed) if quantity == TOTALS else _line(found, quantity, seed)
        for quantity in PAPER
    ]
    return pl.DataFrame(
        [{**line, "paper": PAPER[str(line["quantity"])] if gamma == PAPER_GAMMA else None} for line in lines],
        infer_schema_length=None,
    )


def need_map(trace: Trace, gamma: float = 0.95) -> pl.DataFrame:
    """Return the mean size of C*(gamma) over the context (Fig. 1a): `layer, kv_head, fraction`."""
    return (
        _rows(trace, gamma)
        .group_by("layer", "kv_head")
        .agg((pl.col("pages") / pl.col("n_pages")).mean().alias("fraction"))
        .sort("layer", "kv_head")
        .collect(engine="streaming")
    )


def plot(table: pl.DataFrame, ax: Axes | None = None, title: str = "Mean size of the oracle set") -> Axes:
    """Draw the map of `need_map` as a heatmap, layers across and KV heads down."""
    import matplotlib.pyplot as plt
    import seaborn

    layers = table["layer"].unique().sort().to_list()
    heads = table["kv_head"].unique().sort().to_list()
    grid = np.full((len(heads), len(layers)), np.nan)
    for layer, head, fraction in table.select("layer", "kv_head", "fraction").iter_rows():
        grid[heads.index(head), layers.index(layer)] = 100 * fraction
    ax = ax or plt.gca()
    seaborn.heatmap(
        grid,
        ax=ax,
        vmin=0,
        vmax=100,
        cmap="rocket_r",
        xticklabels=False,
        yticklabels=heads,
        cbar_kws={"label": "pages needed (% of context)"},
    )
    stride = 2 if len(layers) > 16 else 1
    ax.set_xticks(np.arange(0, len(layers), stride) + 0.5, layers[::stride])
    ax.set(xlabel="layer", ylabel="KV head", title=title)
    ax.tick_params(axis="both", rotation=0)
    return ax


def figure(table: pl.DataFrame, title: str = "Mean size of the oracle set") -> Figure:
    """Draw the map of `need_map` in a figure of its own."""
    import matplotlib.pyplot as plt

    layers, heads = table["layer"].n_unique(), table["kv_head"].n_unique()
    size = max(6.4, 0.28 * layers + 2), max(2.4, 0.32 * heads + 1.6)
    drawn, ax = plt.subplots(figsize=size, layout="constrained")
    plot(table, ax, title)
    return drawn


def _rows(trace: Trace, gamma: float) -> pl.LazyFrame:
    column = recorded_column(trace, gamma)
    return trace.scan().select("layer", "kv_head", *_as_numbers(column))


def _frames(trace: Trace, gamma: float) -> Iterator[pl.DataFrame]:
    """Yield the rows of every request: `layer, kv_head, step, n_pages, pages`."""
    column = recorded_column(trace, gamma)
    for frame in trace.frames(["layer", "kv_head", "step", "n_pages", column]):
        yield frame.select("layer", "kv_head", "step", *_as_numbers(column))


def _as_numbers(column: str) -> tuple[pl.Expr, pl.Expr]:
    return pl.col("n_pages").cast(pl.Float64), pl.col(column).cast(pl.Float64).alias("pages")


def _line(found: Tally, quantity: str, seed: int) -> dict[str, object]:
    mean = found.mean((quantity,))
    return {
        "quantity": quantity,
        "value": np.nan if mean is None else mean,
        **found.interval((quantity,), seed),
        "groups": found.count((quantity,)),
        "requests": found.requests((quantity,)),
    }


def _across_requests(found: Tally, seed: int) -> dict[str, object]:
    """Return the spread of the requests' mean fractions; there is none of one request."""
    fractions = found.means((TOTALS,))
    value = low = high = np.nan
    if len(fractions) > 1:
        draws = resample_weights(len(fractions), seed) / len(fractions)
        mean = draws @ fractions
        spread = np.sqrt(np.maximum(draws @ fractions**2 - mean**2, 0))
        low, high = interval(spread / mean)
        value = float(fractions.std() / fractions.mean())
    figures = {"value": value, "ci_low": low, "ci_high": high}
    line = {"quantity": TOTALS, **{name: steady(figure) for name, figure in figures.items()}}
    return {**line, "groups": 1, "requests": len(fractions)}
