"""Attention time as list lengths spread (paper, Fig. 4): of the records of `bench attend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Methods in the order of the legend; one that is not here comes after them, under its own name.
TITLES = {
    "attend": "coverage-lab",
    "fa3-varlen": "FA3, varlen",
    "fa3-padded": "FA3, padded",
    "fa3-buckets": "FA3, buckets",
    "fa3-shared": "FA3, one list a layer",
    "flashinfer": "FlashInfer (plan apart)",
    "fa3-dense": "FA3, dense",
    "sdpa": "SDPA, dense",
    "attend-dense": "coverage-lab, dense",
}


def to_frame(records: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return the records of `bench attend` as a frame."""
    return pl.DataFrame(list(records), infer_schema_length=None)


def _titles(table: pl.DataFrame) -> dict[str, str]:
    return TITLES | {name: name for name in table["method"].unique(maintain_order=True) if name not in TITLES}


def plot(table: pl.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw one shape: time against spread, a line a method; dense methods across, a trace's lists apart.

    Parameters
    ----------
    table : DataFrame
        Records of one shape.
    ax : Axes, optional
        Where to draw; the current axes by default.
    """
    import matplotlib.pyplot as plt
    import seaborn

    ax = ax or plt.gca()
    palette = seaborn.color_palette("colorblind")
    titles = _titles(table)
    known = dict(zip(TITLES, [*palette[:6], "black", "0.6", palette[0]], strict=True))
    colours = {method: known.get(method, palette[6 + place % 4]) for place, method in enumerate(titles)}
    drawn = table.filter(~pl.col("lists").is_in(["all", "trace"]))
    real = table.filter(pl.col("lists") == "trace")
    dense = table.filter(pl.col("lists") == "all")
    beyond = max([0.0, *drawn["cv"].to_list()]) + 0.25
    for method, title in titles.items():
        part = drawn.filter(pl.col("method") == method).sort("cv")
        look: dict[str, Any] = {"color": colours[method], "label": title}
        if part.height:
            ours: dict[str, Any] = {"lw": 2.2, "zorder": 3} if method == "attend" else {"lw": 1.2}
            ax.plot(part["cv"], part["us"], "o-", ms=4, **ours, **look)
        for us in real.filter(pl.col("method") == method)["us"]:
            ax.plot([beyond], [us], "D", ms=5, **({"color": colours[method]} if part.height else look))
        for us in dense.filter(pl.col("method") == method)["us"]:
            ax.axhline(us, ls="--", lw=1, **look)
    if real.height:
        ticks = [tick for tick in (0, 0.25, 0.5, 0.75, 1, 1.25) if tick < beyond - 0.2]
        ax.set_xticks([*ticks, beyond], [*(f"{tick:g}" for tick in ticks), "trace"])
    ax.set(xlabel="CV of list lengths", title=table["shape"][0])
    ax.set_ylim(bottom=0)
    ax.set_xlim(-0.1, beyond + 0.1)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    seaborn.despine(ax=ax)
    return ax


def figure(table: pl.DataFrame, title: str = "") -> Figure:
    """Draw every shape side by side, a title above them."""
    import matplotlib.pyplot as plt

    shapes = table["shape"].unique(maintain_order=True).to_list()
    drawn, axes = plt.subplots(
        1, len(shapes), figsize=(3.6 * len(shapes) + 2.2, 3.8), layout="constrained", squeeze=False
    )
    for shape, ax in zip(shapes, axes[0], strict=True):
        plot(table.filter(pl.col("shape") == shape), ax)
    axes[0, 0].set_ylabel("microseconds a layer")
    drawn.suptitle(title)
    # A method may be missing at one shape and there at another.
    named: dict[str, Artist] = {}
    for ax in axes[0]:
        handles, labels = ax.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    order = [title for title in _titles(table).values() if title in named]
    drawn.legend(
        handles=[named[title] for title in order], labels=order, frameon=False, loc="outside right center"
    )
    return drawn
