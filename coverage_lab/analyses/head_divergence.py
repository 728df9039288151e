"""Divergence from dense of a model in which one KV head alone follows a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def to_frame(lines: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return the KV heads among the lines of an explanation as a frame, by layer and head."""
    heads = [line for line in lines if line["what"] == "heads"]
    return pl.DataFrame(heads, infer_schema_length=None).sort("layer", "kv_head")


def plot(table: pl.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw a map of the divergence over layers and KV heads, in powers of ten.

    Parameters
    ----------
    table : DataFrame
        Of `to_frame`.
    ax : Axes, optional
        Where to draw; the current axes by default.
    """
    import matplotlib.pyplot as plt
    import seaborn
    from matplotlib.colors import LogNorm

    ax = ax or plt.gca()
    grid = table.pivot("layer", index="kv_head", values="kl").sort("kv_head")
    layers = [name for name in grid.columns if name != "kv_head"]
    highest = max(float(table["kl"].max() or 0), 1e-12)  # type: ignore[arg-type]
    seaborn.heatmap(
        grid.select(layers).to_numpy().clip(highest * 1e-4),
        norm=LogNorm(highest * 1e-4, highest),
        cmap="rocket_r",
        xticklabels=layers,
        yticklabels=grid["kv_head"].to_list(),
        cbar_kws={"label": "KL to dense, nats"},
        ax=ax,
    )
    ax.set(xlabel="layer", ylabel="KV head", title="One KV head follows the policy, the others read all")
    return ax


def figure(table: pl.DataFrame, title: str = "") -> Figure:
    """Draw the map in a figure of its own; `title` says of what."""
    import matplotlib.pyplot as plt

    layers, heads = table["layer"].n_unique(), table["kv_head"].n_unique()
    size = max(6.4, 0.28 * layers + 2.4), 0.28 * heads + 1.9
    drawn, ax = plt.subplots(figsize=size, layout="constrained")
    plot(table, ax)
    drawn.suptitle(title, fontsize="medium")
    return drawn
