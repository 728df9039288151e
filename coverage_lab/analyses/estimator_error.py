"""How estimates of the mass err, head by head (paper, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, register
from coverage_lab.analyses.lists import Tally, over_blocks
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Block, Trace
from coverage_lab.trace.schema import share_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Shares of float16 below this are rounded to nothing, or nearly.
LEAST = 1e-6
# Heads that are named in the figure.
NAMED = 8
FIGURES = ("log_error", "at_limit", "rank_correlation", "coverage")


@register("estimator-error")
@dataclass(frozen=True, kw_only=True)
class EstimatorError(Analysis):
    """Error of an estimate by layer and KV head: of its scale, of its order, and what the order costs.

    Only pages that are estimated count: all but the sink and the current one. The log error is that of their
    mass together, the log odds of their share under the estimate less those of the exact share. Stored
    shares end at about one in a million, and these odds at 13.8 to either side: `at_limit` is the part of the
    rows in which they do, where the log error is a lower bound. The rank correlation (Spearman) is over these
    pages. The coverage is the exact mass of as many pages as the oracle set has, taken in the order of the
    estimate; a head fails if that lies so far below gamma.

    Parameters
    ----------
    estimator : str
        One of those recorded.
    gamma : float
        Of the oracle set.
    fails : float
        A head fails if it covers less than gamma minus this.
    seed : int
        Of the bootstrap.
    """

    title = "how an estimate errs"
    source = "paper, appendix A"

    estimator: str = "mvar"
    gamma: float = 0.95
    fails: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gamma < 1:
            raise CoverageLabError(f"--gamma {self.gamma:g} is not between 0 and 1")
        if not 0 <= self.fails < 1:
            raise CoverageLabError(f"--fails {self.fails:g} is not from 0 to 1")

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return the figures of every KV head.

        Columns: `layer, kv_head, log_error, at_limit, rank_correlation, coverage, ci_low, ci_high, fails,
        rows`.
        Heads come by rising coverage, which the interval is of. `log_error` is in nats, above 0 where the
        estimate is too large; null where no page is estimated.
        """
        from coverage_lab.policies.estimators import estimators

        estimators.get(self.estimator)
        if self.estimator == "exact":
            raise CoverageLabError("estimator exact has no error; name one that estimates, mvar for example")
        tally = Tally(len(trace.shards))
        rows: dict[tuple[int, int], int] = {}

        def work(block: Block) -> tuple[Block, dict[str, np.ndarray]]:
            return block, _errors(block, share_column(self.estimator), self.gamma)

        for block, found in over_blocks(trace, [share_column("exact"), share_column(self.estimator)], work):
            layers = block.columns["layer"].reshape(block.layers, -1)[:, 0]
            for place, head in np.ndindex(block.layers, block.kv_heads):
                key = int(layers[place]), head
                rows[key] = rows.get(key, 0) + block.steps
                for name in FIGURES:
                    values = found[name].reshape(block.layers, block.kv_heads, block.steps)[place, head]
                    tally.add(block.request, (name, *key), values[np.isfinite(values)])
        lines = [
            {
                "layer": layer,
                "kv_head": head,
                **{name: tally.mean((name, layer, head)) for name in FIGURES},
                **tally.interval(("coverage", layer, head), self.seed),
                "fails": (tally.mean(("coverage", layer, head)) or 0.0) < self.gamma - self.fails,
                "rows": count,
            }
            for (layer, head), count in rows.items()
        ]
        return pl.DataFrame(lines, infer_schema_length=None).sort("coverage", "layer", "kv_head")

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn

        ax = ax or plt.gca()
        good, bad = seaborn.color_palette("colorblind")[0], seaborn.color_palette("colorblind")[3]
        colours = [bad if fails else good for fails in table["fails"]]
        ax.scatter(table["log_error"], table["coverage"], c=colours, s=22)
        worst = table.filter(pl.col("fails") & pl.col("log_error").is_not_null()).head(NAMED)
        for layer, head, error, coverage in worst.select(
            "layer", "kv_head", "log_error", "coverage"
        ).iter_rows():
            ax.annotate(f" {layer}.{head}", (error, coverage), fontsize=8, va="center")
        ax.axvline(0, color="0.7", lw=1)
        ax.axhline(self.gamma, color="0.7", lw=1, ls="--")
        ax.set(
            xlabel="log of estimated over exact mass, nats (ends at about 14)",
            ylabel="mass of the oracle's count,\nin the estimate's order",
            title=f"{self.estimator}: every KV head; layer.head of the worst",
        )
        seaborn.despine(ax=ax)
        return ax


def _errors(block: Block, column: str, gamma: float) -> dict[str, np.ndarray]:
    """Return the figures of every row, `[rows]`; NaN where there is none."""
    exact, estimate = (block.columns[name].astype(np.float64) for name in (share_column("exact"), column))
    n_pages, first = block.columns["n_pages"][:, None], block.columns["first_page"][:, None]
    place = np.arange(exact.shape[1])
    valid = place < n_pages
    summarised = valid & (place < n_pages - 1) & (place + first > 0)
    exact, estimate = (
        shares / np.maximum(shares.sum(1, keepdims=True), LEAST) for shares in (exact, estimate)
    )

    parts = [
        np.clip(np.where(summarised, shares, 0).sum(1), LEAST, 1 - LEAST) for shares in (estimate, exact)
    ]
    odds = [np.log(part) - np.log1p(-part) for part in parts]
    any_page = summarised.any(1)
    at_limit = np.max(np.abs(odds), axis=0) > -np.log(2 * LEAST)

    counts = _fewest(np.where(valid, exact, -1), gamma)
    order = np.argsort(-np.where(valid, estimate, -1), axis=1, kind="stable")
    ranked = np.take_along_axis(exact, order, 1).cumsum(1)
    return {
        "log_error": np.where(any_page, odds[0] - odds[1], np.nan),
        "at_limit": np.where(any_page, at_limit, np.nan),
        "rank_correlation": _spearman(exact, estimate, summarised),
        "coverage": np.take_along_axis(ranked, counts[:, None] - 1, 1)[:, 0],
    }


def _fewest(shares: np.ndarray, gamma: float) -> np.ndarray:
    """Return the size of C*(gamma), `[rows]`; padding is below zero."""
    ranked = np.maximum(-np.sort(-shares, axis=1), 0).cumsum(1)
    return np.minimum((ranked < gamma - LEAST).sum(1) + 1, shares.shape[1])


def _spearman(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the rank correlation of every row over masked columns; NaN for one or two, or ties only."""
    from scipy.stats import rankdata

    n = mask.sum(1)
    ranks = []
    for shares in (one, other):
        # What is left out ranks last, alike in both.
        ranked = rankdata(np.where(mask, shares, np.inf), axis=1)
        mean = np.where(mask, ranked, 0).sum(1) / np.maximum(n, 1)
        ranks.append(np.where(mask, ranked - mean[:, None], 0))
    top = (ranks[0] * ranks[1]).sum(1)
    bottom = np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 2, top / bottom, np.nan)
