"""Policies side by side: what a guarantee costs, and what equal reads keep (paper Fig. 1b and 5.5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "same_guarantee": "Same guarantee",
    "same_reads": "Same reads",
    "given": "Policies as given",
}
NONE = "none"
# What is drawn along the axis, its label, and what has a line of its own.
_AXES = {
    "same_guarantee": ("tokens_over_oracle", "tokens read, relative to the oracle set", "budget"),
    "same_reads": ("rows_below_target", "rows below the target coverage", "budget"),
    "given": ("rows_below_target", "rows below the target coverage", "policy"),
}


def compute(trace: Trace, **options: Any) -> pl.DataFrame:
    """Return both tables of `policies.compare.compare` as one frame; `options` go there."""
    from coverage_lab.policies.compare import compare

    return to_frame(compare(trace, **options))


def to_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """Return records of a comparison as a frame, with `estimator` and `budget` split off the policy."""
    frame = pl.DataFrame(records, infer_schema_length=None)
    names = pl.col("policy").str.extract_groups(r"^(?<estimator>[^/]+)/(?<budget>[^:,@]+(?::per-[a-z_]+)?)")
    frame = frame.with_columns(names.struct.field("estimator"), names.struct.field("budget"))
    # A budget that reads no shares belongs to no estimator, whatever its text begins with.
    reads_none = pl.col("reads_metadata") == 0
    return frame.with_columns(
        pl.when(reads_none).then(pl.lit(NONE)).otherwise("estimator").alias("estimator")
    )


def plot(table: pl.DataFrame, ax: Axes | None = None, lines: Sequence[str] | None = None) -> Axes:
    """Draw one table: a dot and its 95% interval for each policy, a line for each budget.

    Parameters
    ----------
    table : DataFrame
        Lines of one table of `compute`.
    ax : Axes, optional
        Where to draw; the current axes by default.
    lines : sequence of str, optional
        The budgets from top to bottom; the best first by default.
    """
    import matplotlib.pyplot as plt
    import seaborn
    from matplotlib.ticker import PercentFormatter

    ax = ax or plt.gca()
    kind = table["table"][0]
    column, label, line = _AXES[kind]
    lines = _best_first(table) if lines is None else list(lines)
    estimators = sorted(set(table["estimator"]) - {NONE}, key=lambda name: (name != "exact", name))
    colours = dict(zip(estimators, seaborn.color_palette("colorblind", len(estimators)), strict=True))
    for estimator, colour in {**colours, NONE: (0.5, 0.5, 0.5)}.items():
        part = table.filter(pl.col("estimator") == estimator)
        if part.is_empty():
            continue
        alone = kind == "given" or estimator == NONE
        offset = 0.0 if alone else 0.16 * (estimators.index(estimator) - (len(estimators) - 1) / 2)
        heights = [lines.index(name) + offset for name in part[line]]
        ax.hlines(heights, part["ci_low"], part["ci_high"], color=colour, lw=2, alpha=0.6)
        ax.plot(part[column], heights, "o", color=colour, ms=5, label=estimator)
    ax.set_yticks(range(len(lines)), [name.replace(":per-", ", per ").replace("_", " ") for name in lines])
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set(xlabel=label, title=TITLES[kind])
    if kind == "same_guarantee":
        ax.axvline(1, color="0.4", ls="--", lw=1, zorder=0)
        ax.text(1, len(lines) - 0.55, " oracle set", color="0.4", fontsize="small")
    else:
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    ax.legend(title="shares from", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    seaborn.despine(ax=ax)
    return ax


def figure(table: pl.DataFrame) -> Figure:
    """Draw every table of a comparison side by side, the budgets in the order of the first one."""
    import matplotlib.pyplot as plt

    kinds = table["table"].unique(maintain_order=True).to_list()
    tables = [table.filter(pl.col("table") == kind) for kind in kinds]
    lines = list(dict.fromkeys(name for part in tables for name in _best_first(part)))
    size = 6.4 * len(kinds) + 0.6, 0.55 * len(lines) + 1.4
    drawn, axes = plt.subplots(1, len(kinds), figsize=size, layout="constrained", squeeze=False)
    for part, ax in zip(tables, axes[0], strict=True):
        plot(part, ax, lines)
        if ax is not axes[0, -1]:
            ax.get_legend().remove()
    return drawn


def _best_first(table: pl.DataFrame) -> list[str]:
    column, _, line = _AXES[table["table"][0]]
    return table.group_by(line).agg(pl.col(column).min()).sort(column, line)[line].to_list()
