"""Where a policy spends its budget (paper, 6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, beside_paper, register
from coverage_lab.analyses.lists import Lists, over_lists
from coverage_lab.analyses.needs import steady
from coverage_lab.bootstrap import interval, resample_weights
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Qwen3-4B-Thinking on AIME under mvar/coverage:0.98.
PAPER_POLICY = "mvar/coverage:0.98"
PAPER = {
    "least reading KV head": "0.037",
    "most reading KV head": "0.92",
    "median layer's most over least reading KV head": "4.0",
    "largest of these ratios": "16.6",
    "most reading layer": "0.56-0.74 (layers 0-3)",
    "least reading layer": "about 0.25",
}


@register("where")
@dataclass(frozen=True, kw_only=True)
class Where(Analysis):
    """Mean fraction of the pages that a policy keeps, by layer and KV head.

    Parameters
    ----------
    policy : str
        What chooses the pages.
    seed : int
        Of the bootstrap.
    """

    title = "where the budget goes"
    source = "paper, 6.1"

    policy: str = PAPER_POLICY
    seed: int = 0

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `what, layer, value, ci_low, ci_high, paper`.

        `layer` is null for figures of all layers; `value` is a mean fraction of the row's pages, or a ratio
        of two.
        """
        requests = len(trace.shards)
        kept: dict[int, np.ndarray] = {}
        rows = np.zeros(requests)
        for request, layers, sums, steps in over_lists(trace, self.policy, _fractions):
            for layer, own in zip(layers, sums, strict=True):
                kept.setdefault(int(layer), np.zeros((requests, len(own))))[request] = own
            rows[request] = steps
        names = sorted(kept)
        sums = np.stack([kept[layer] for layer in names], 1)  # [requests, L, KV heads]

        whole = _figures(sums.sum(0) / rows.sum())
        # One request has no interval.
        low_high = {key: np.full((*values.shape, 2), np.nan) for key, values in whole.items()}
        if requests > 1:
            weights = resample_weights(requests, self.seed)
            drawn = np.einsum("nr,rlh->nlh", weights, sums) / (weights @ rows)[:, None, None]
            for key, values in _figures(drawn).items():
                pairs = [interval(column) for column in values.reshape(len(values), -1).T]
                low_high[key] = np.reshape(pairs, low_high[key].shape)
        lines = []
        for what, value in whole.items():
            ends = low_high[what]
            for place in np.ndindex(value.shape):
                layer = names[place[0]] if place else None
                lines.append(
                    {
                        "what": what,
                        "layer": layer,
                        "value": steady(float(value[place])),
                        "ci_low": steady(float(ends[place][0])),
                        "ci_high": steady(float(ends[place][1])),
                        "paper": PAPER.get(what) if layer is None and self.policy == PAPER_POLICY else None,
                    }
                )
        return pl.DataFrame(lines, infer_schema_length=None)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        return beside_paper(
            table,
            "value",
            lambda line: f"{self.policy}, {line['what']} (paper: Qwen3-4B-Thinking, AIME)",
        )

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colour = seaborn.color_palette("colorblind")[0]
        mean, least, most = (
            table.filter(pl.col("what") == what)
            for what in ("mean of the layer", "its least reading KV head", "its most reading KV head")
        )
        ax.vlines(mean["layer"], least["value"], most["value"], color="0.75", lw=3, label="its KV heads")
        ax.plot(mean["layer"], mean["value"], "o", color=colour, label="mean of the layer")
        ax.set(
            xlabel="layer",
            ylabel="pages kept, of the context",
            title=f"Where {self.policy} reads",
            ylim=(0, 1),
        )
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(frameon=False)
        seaborn.despine(ax=ax)
        return ax


def _fractions(lists: Lists) -> tuple[int, np.ndarray, np.ndarray, int]:
    fractions = lists.counts / lists.n_pages
    return lists.request, lists.layers, fractions.sum(-1), fractions.shape[-1]


def _figures(fraction: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is told of fractions `[..., L, KV heads]`, by layer `[..., L]` or of all `[...]`."""
    least, most, mean = fraction.min(-1), fraction.max(-1), fraction.mean(-1)
    ratio = most / least
    return {
        "least reading KV head": least.min(-1),
        "most reading KV head": most.max(-1),
        "least reading layer": mean.min(-1),
        "most reading layer": mean.max(-1),
        "median layer's most over least reading KV head": np.median(ratio, -1),
        "largest of these ratios": ratio.max(-1),
        # Of every layer:
        "mean of the layer": mean,
        "its least reading KV head": least,
        "its most reading KV head": most,
    }
