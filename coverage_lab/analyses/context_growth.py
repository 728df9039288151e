"""How the need grows with the context: pages against tokens, and the exponent of every KV head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, register
from coverage_lab.analyses.needs import needed, steady
from coverage_lab.bootstrap import interval, resample_weights
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The longest context over the shortest.
LEAST_SPREAD = 1.25


@register("context-growth")
@dataclass(frozen=True, kw_only=True)
class ContextGrowth(Analysis):
    """Fit `pages needed = a * (pages of the context) ** b` over requests, for every KV head and over all.

    A fixed count is right for every context where b is 0, a fixed fraction where it is 1. Every request is a
    point: the mean of the logarithms over its steps.

    Parameters
    ----------
    gamma : float
        Coverage of the oracle set; one of those recorded.
    seed : int
        Of the bootstrap.
    """

    title = "how the need grows with the context"
    source = "paper, 2.2.2: one count must be tuned anew for every length"

    gamma: float = 0.95
    seed: int = 0

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `layer, kv_head, exponent, ci_low, ci_high, requests`; layer and head are null for all rows.

        Raises
        ------
        CoverageLabError
            If all requests are about as long: there is nothing to fit.
        """
        points = (
            needed(trace, self.gamma)
            .group_by("layer", "kv_head", "request_id")
            .agg(x=pl.col("n_pages").log().mean(), y=pl.col("needed").log().mean(), rows=pl.len())
            .sort("layer", "kv_head", "request_id")
            .collect(engine="streaming")
        )
        overall = (
            points.group_by("request_id")
            .agg(((pl.col(c) * pl.col("rows")).sum() / pl.col("rows").sum()).alias(c) for c in ("x", "y"))
            .sort("request_id")
        )
        shortest, longest = (math.exp(end) for end in (overall["x"].min(), overall["x"].max()))  # type: ignore[arg-type]
        if longest < LEAST_SPREAD * shortest:
            raise CoverageLabError(
                f"{trace.path} has contexts of {shortest:.3g} to {longest:.3g} pages; growth needs requests "
                "of several lengths"
            )
        lines = [{"layer": None, "kv_head": None, **self._fit(overall)}]
        for (layer, kv_head), part in points.group_by(["layer", "kv_head"], maintain_order=True):
            lines.append({"layer": layer, "kv_head": kv_head, **self._fit(part)})
        return pl.DataFrame(lines, infer_schema_length=None)

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn

        ax = ax or plt.gca()
        heads = table.filter(pl.col("layer").is_not_null())
        whole = float(table.filter(pl.col("layer").is_null())["exponent"][0])
        seaborn.histplot(x=heads["exponent"].to_numpy(), ax=ax, color=seaborn.color_palette("colorblind")[0])
        ax.axvline(whole, color="0.2", ls="--", lw=1)
        ax.text(
            whole,
            ax.get_ylim()[1] * 0.97,
            f" all rows: {whole:.2f}",
            va="top",
            bbox={"color": "white", "alpha": 0.8, "pad": 1},
        )
        ax.set(
            xlabel="exponent: 0 needs a fixed count, 1 a fixed fraction",
            ylabel="KV heads",
            title=f"Growth of C*({self.gamma:g}) with the context",
        )
        seaborn.despine(ax=ax)
        return ax

    def _fit(self, points: pl.DataFrame) -> dict[str, object]:
        x, y = points["x"].to_numpy(), points["y"].to_numpy()
        weights = resample_weights(len(points), self.seed)
        low, high = interval(_slopes(x, y, weights))
        (exponent,) = _slopes(x, y, np.ones((1, len(points))))
        found = {"exponent": float(exponent), "ci_low": low, "ci_high": high}
        return {**{name: steady(value) for name, value in found.items()}, "requests": len(points)}


def _slopes(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the least-squares slope of y on x under every row of weights; NaN where x does not vary."""
    total = weights.sum(1)
    mean_x, mean_y = weights @ x / total, weights @ y / total
    spread = weights @ x**2 / total - mean_x**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 1e-12, (weights @ (x * y) / total - mean_x * mean_y) / spread, np.nan)
