"""Where the mass lies: the sink page, the latest pages, and everything between (paper, 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, register
from coverage_lab.analyses.lists import Lists, Tally, over_lists
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("sink", "local", "elsewhere")


@register("sinks")
@dataclass(frozen=True, kw_only=True)
class Sinks(Analysis):
    """Mean share of page 0, of the latest pages, and of all others.

    Where the others have next to nothing, a window with a sink is enough for the head (StreamingLLM,
    DuoAttention). A page that is both the first and one of the latest counts as sink; rows of sliding windows
    that no longer see page 0 have none.

    Parameters
    ----------
    local : int
        How many pages are the latest ones, the current page among them.
    seed : int
        Of the bootstrap.
    """

    title = "mass on the sink page, on the latest pages and elsewhere"
    source = "paper, 2.1.2 and 3.2: sink and current page are always kept"

    local: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.local < 1:
            raise CoverageLabError(f"--local {self.local}: at least the current page is local")

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `layer, kv_head, part, share, ci_low, ci_high, requests`; means of all have no layer."""
        tally = Tally(len(trace.shards))
        # A window that keeps the sink and the latest pages is a policy.
        policy = f"exact/window:{self.local},sink=1"
        for request, layers, parts in over_lists(trace, policy, _parts):
            for part, shares in parts.items():
                for place, layer in enumerate(layers):
                    for head in range(shares.shape[1]):
                        tally.add(request, (int(layer), head, part), shares[place, head])
                tally.add(request, (None, None, part), shares)
        heads = sorted({key[:2] for key in tally.groups() if key[0] is not None})
        lines = [
            {
                "layer": layer,
                "kv_head": head,
                "part": part,
                "share": tally.mean((layer, head, part)),
                **tally.interval((layer, head, part), self.seed),
                "requests": tally.requests((layer, head, part)),
            }
            for layer, head in [(None, None), *heads]
            for part in PARTS
        ]
        return pl.DataFrame(lines, infer_schema_length=None)

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        by_layer = (
            table.filter(pl.col("layer").is_not_null())
            .group_by("layer", "part")
            .agg(pl.col("share").mean())
            .sort("layer")
        )
        below = np.zeros(by_layer["layer"].n_unique())
        for part, colour in zip(PARTS, seaborn.color_palette("colorblind"), strict=False):
            own = by_layer.filter(pl.col("part") == part)
            height = own["share"].to_numpy()
            label = {"sink": "page 0", "local": f"latest {self.local} pages"}.get(part, part)
            ax.bar(own["layer"].to_numpy(), height, 0.9, below, color=colour, label=label)
            below = below + height
        ax.set(xlabel="layer", ylabel="mean share of the mass", title="Where the mass lies", ylim=(0, 1))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(frameon=False, bbox_to_anchor=(1.01, 0.5), loc="center left")
        seaborn.despine(ax=ax)
        return ax


def _parts(lists: Lists) -> tuple[int, np.ndarray, dict[str, np.ndarray]]:
    """Return the request, the layers, and the mass of every part, `[L, KV heads, steps]`."""
    local = lists.exact.copy()
    local[~lists.kept] = 0
    sink = np.zeros(local.shape[:3])
    if lists.first_page == 0:
        sink, local[..., 0] = local[..., 0].copy(), 0
    latest = local.sum(-1)
    return (
        lists.request,
        lists.layers,
        dict(zip(PARTS, (sink, latest, np.maximum(1 - sink - latest, 0)), strict=True)),
    )
