"""KL divergence from dense against pages read: of the lines that sum up a replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def to_frame(lines: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return the lines of a summary as a frame with `estimator`, `rule` and `number`.

    The number is the budget's first, as the policy has it; the rule is the policy without it.
    """
    frame = pl.DataFrame(list(lines), infer_schema_length=None)
    policy = pl.col("policy")
    number = r"^([^/]+/[a-z_]+):(?:tokens=)?(inf|-?[0-9.]+(?:e[-+]?[0-9]+)?)"
    return frame.with_columns(
        policy.str.extract(r"^([^/]+)/").alias("estimator"),
        # The number is what moves along a curve; all other options make another curve.
        policy.str.replace(number, "$1").alias("rule"),
        policy.str.extract(number, 2).alias("number"),
    )


def plot(table: pl.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw a curve for each rule: mean divergence and its 95% interval over reads, a colour an estimator.

    Parameters
    ----------
    table : DataFrame
        Of `to_frame`.
    ax : Axes, optional
        Where to draw; the current axes by default.
    """
    import matplotlib.pyplot as plt
    import seaborn
    from matplotlib.ticker import PercentFormatter

    ax = ax or plt.gca()
    # A policy that reads everything is the numerical error, and has no place on the curve.
    drawn = table.filter(pl.col("reads") < 1)
    control = table.filter(pl.col("reads") == 1)["kl_mean"].to_list()
    estimators = sorted(map(str, drawn["estimator"].unique()), key=lambda name: (name != "exact", name))
    colours = dict(zip(estimators, seaborn.color_palette("colorblind", len(estimators)), strict=True))
    for estimator in estimators:
        rules = drawn.filter(pl.col("estimator") == estimator)["rule"].unique(maintain_order=True)
        for style, rule in zip(cycle(("o-", "s--", "^:", "D-.", "v-", "P--")), rules):
            part = drawn.filter(pl.col("rule") == rule).sort("reads")
            low, high = part["ci_low"].fill_nan(None), part["ci_high"].fill_nan(None)
            ax.vlines(part["reads"], low, high, color=colours[estimator], lw=1.5, alpha=0.6)
            ax.plot(part["reads"], part["kl_mean"], style, color=colours[estimator], ms=5, label=rule)
            for reads, kl, number in part.select("reads", "kl_mean", "number").iter_rows():
                ax.annotate(
                    number or "",
                    (reads, kl),
                    (4, 3),
                    textcoords="offset points",
                    fontsize="x-small",
                    color="0.3",
                )
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set(xlabel="pages read", ylabel="KL divergence from dense, nats (95%)")
    if control:
        ax.set_title(f"every page kept: {max(control):.1g} nats", fontsize="medium")
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    if drawn.height:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    seaborn.despine(ax=ax)
    return ax


def figure(table: pl.DataFrame, title: str = "") -> Figure:
    """Draw the curves in a figure of their own; `title` says of what."""
    import matplotlib.pyplot as plt

    # The legend stands beside the curves: room for its longest line, and for all of its lines.
    rules = table["rule"].unique()
    width, height = 5.6 + 0.09 * (rules.str.len_chars().max() or 0), max(4.4, 0.4 + 0.24 * len(rules))  # type: ignore[operator]
    drawn, ax = plt.subplots(figsize=(width, height), layout="constrained")
    plot(table, ax)
    ax.set_title("\n".join(filter(None, (title, ax.get_title()))), fontsize="medium")
    return drawn
