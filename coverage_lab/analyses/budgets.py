"""What every kind of budget reads for the same guarantee (paper, Fig. 1b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, beside_paper, register
from coverage_lab.trace import Trace
from coverage_lab.trace.schema import share_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Llama-3.1-8B, exact mass, 90% of the rows keep 95% of it.
PAPER = {"one fixed count": "2.38", "a profile per KV head": "1.73"}
RULES = {"fixed": "one fixed count", "profiled:per-kv_head": "a profile per KV head"}


@register("budgets")
@dataclass(frozen=True, kw_only=True)
class Budgets(Analysis):
    """Tokens that the smallest sufficient budget of every kind reads, over those of the oracle set.

    Parameters
    ----------
    estimator : str
        What ranks the pages; one of those recorded.
    coverage : float
        Exact mass that a row should keep.
    rows : float
        Fraction of the rows that should keep it.
    seed : int
        Of the bootstrap.
    """

    title = "what the same guarantee costs"
    source = "paper, Fig. 1b and 2.2.1"

    estimator: str = "exact"
    coverage: float = 0.95
    rows: float = 0.9
    seed: int = 0

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `policy, reads, tokens_over_oracle, ci_low, ci_high, paper`."""
        from coverage_lab.policies.compare import same_guarantee
        from coverage_lab.policies.estimators import estimators

        estimators.get(self.estimator)

        trace.require([share_column("exact"), share_column(self.estimator)])
        found = same_guarantee(trace, self.coverage, self.rows, self.seed, names=[self.estimator])
        as_in_paper = (self.estimator, self.coverage, self.rows) == ("exact", 0.95, 0.9)
        return pl.DataFrame(
            [
                {
                    **{name: line[name] for name in ("policy", "reads", "tokens_over_oracle")},
                    "ci_low": line["ci_low"],
                    "ci_high": line["ci_high"],
                    "paper": PAPER.get(_rule(line["policy"])) if as_in_paper else None,
                }
                for line in found
            ],
            infer_schema_length=None,
        )

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        return beside_paper(
            table,
            "tokens_over_oracle",
            lambda line: f"tokens over the oracle set, {_rule(line['policy'])}",
            note=lambda line: line["policy"].partition("/")[2],
        )

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn

        ax = ax or plt.gca()
        places = np.arange(table.height)
        ax.barh(places, table["tokens_over_oracle"], color=seaborn.color_palette("colorblind")[0])
        ax.hlines(places, table["ci_low"], table["ci_high"], color="0.2", lw=1.5)
        ends = table.select(pl.col("ci_high").fill_nan(pl.col("tokens_over_oracle")))["ci_high"]
        for place, (ratio, end) in enumerate(zip(table["tokens_over_oracle"], ends, strict=True)):
            ax.text(end + 0.03, place, f"{ratio:.2f}", va="center")
        ax.axvline(1, color="0.4", lw=1, ls="--")
        ax.set_yticks(places, table["policy"].to_list())
        ax.invert_yaxis()
        ax.set(
            xlabel="tokens read over those of the oracle set",
            title=f"{self.rows:.0%} of the rows keep {self.coverage:.0%} of the mass",
        )
        ax.margins(x=0.12)
        seaborn.despine(ax=ax)
        return ax


def _rule(policy: str) -> str:
    """Return what the paper calls the rule of a policy; its text where the paper has no word."""
    rule = policy.partition("/")[2]
    return next((name for start, name in RULES.items() if rule.startswith(start)), rule)
