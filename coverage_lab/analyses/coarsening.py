"""What coarser lists would read: padded, in buckets, or shared by a layer's KV heads (paper, Fig. 1c)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, beside_paper, register
from coverage_lab.analyses.lists import Lists, over_lists
from coverage_lab.analyses.needs import steady
from coverage_lab.bootstrap import interval
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Resamples of the requests, and batches of each.
RESAMPLES, AGAIN = 300, 8
OWN, SUMMED = "a list of its own for every KV head", "one list a layer: the heads' summed shares"
BATCH = "padded to the longest list of the batch"
SCHEMES = (
    OWN,
    "padded to the longest head of the layer",
    "padded to the next power of two",
    BATCH,
    "one list a layer: the union",
    SUMMED,
)
# Llama-3.1-8B, pages of the dense cache: 2.2.1 with C*(0.95); 5.5.3 with mvar/coverage:0.98.
PAPER = {
    ("exact/coverage:0.95", SCHEMES[0]): "21%",
    ("exact/coverage:0.95", SCHEMES[1]): "42%",
    ("mvar/coverage:0.98", SCHEMES[0]): "33-41%",
    ("mvar/coverage:0.98", SCHEMES[4]): "78-87%",
}


@register("coarsening")
@dataclass(frozen=True, kw_only=True)
class Coarsening(Analysis):
    """Reads of batches drawn from the trace, if lists are not each KV head's own.

    A batch has a random step of each of its requests, which are drawn with replacement. Padding ends with the
    context of the row. All but the last scheme hold every page of the own lists; the list of summed shares
    may leave a head with less than the policy promises.

    Parameters
    ----------
    policy : str
        What chooses the pages, a list for every KV head.
    batch : int
        Requests of a batch.
    batches : int
    seed : int
        Of the batches.
    """

    title = "what coarser lists read"
    source = "paper, Fig. 1c, 2.2.1 and 5.5.3"

    policy: str = "exact/coverage:0.95"
    batch: int = 32
    batches: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "batches"):
            if getattr(self, name) < 1:
                raise CoverageLabError(f"--{name} {getattr(self, name)} is not 1 or more")

    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return `scheme, reads, ci_low, ci_high, over_own, coverage_mean, paper`.

        `reads` is the pages read over those of the context, a mean over batches; its interval draws the
        requests anew, and batches from them. `over_own` is over the reads of own lists; `coverage_mean` the
        exact mass that rows of the whole trace keep, where a scheme changes it.
        """
        from coverage_lab.policies.policy import parse_policy

        asked = parse_policy(self.policy)
        if asked.granularity != "kv_head":
            raise CoverageLabError(f"policy {self.policy}: lists of KV heads are coarsened; leave out @")
        requests, steps = self._draw(trace)
        drawn, of_batch = np.unique(
            np.stack([requests.ravel(), steps.ravel()], 1), axis=0, return_inverse=True
        )
        own, own_coverage = _collect(trace, self.policy, drawn)
        shared, shared_coverage = _collect(trace, str(replace(asked, granularity="layer")), drawn)
        heads = int(trace.geometry["kv_heads"])
        found = np.array([_reads(own, shared, heads, batch) for batch in of_batch.reshape(requests.shape)])
        reads, resampled = found[: self.batches], found[self.batches :]
        mean = reads.mean(0)
        # [resamples, schemes]; one request has no interval.
        resampled = resampled.reshape(-1, AGAIN, len(SCHEMES)).mean(1)
        lines = []
        for place, scheme in enumerate(SCHEMES):
            low, high = interval(resampled[:, place])
            lines.append(
                {
                    "scheme": scheme,
                    "reads": steady(float(mean[place])),
                    "ci_low": steady(low),
                    "ci_high": steady(high),
                    "over_own": steady(float(mean[place] / mean[0])),
                    "coverage_mean": {OWN: own_coverage, SUMMED: shared_coverage}.get(scheme),
                    "paper": PAPER.get((self.policy, scheme)),
                }
            )
        return pl.DataFrame(lines, infer_schema_length=None)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        return beside_paper(
            table, "reads", lambda line: f"pages read, {self.policy}, {line['scheme']}", "share"
        )

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colours = seaborn.color_palette("colorblind")
        places = np.arange(table.height)
        ax.barh(places, table["reads"], color=[colours[1], *[colours[0]] * (table.height - 1)])
        ax.hlines(places, table["ci_low"], table["ci_high"], color="0.2", lw=1.5)
        # One request has no interval.
        ends = table.select(pl.col("ci_high").fill_nan(pl.col("reads")))["ci_high"].to_list()
        for place, (reads, end) in enumerate(zip(table["reads"], ends, strict=True)):
            ax.text(end + 0.01, place, f"{reads:.0%}", va="center")
        ax.set_yticks(places, table["scheme"].to_list())
        ax.invert_yaxis()
        ax.set(
            xlabel=f"pages read, of the context; batches of {self.batch}",
            title=self.policy,
            xlim=(0, max(1.0, 1.1 * max(ends))),
        )
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        seaborn.despine(ax=ax)
        return ax

    def _draw(self, trace: Trace) -> tuple[np.ndarray, np.ndarray]:
        """Return the requests of every batch and the step of each, `[all batches, batch]`.

        After the `batches`, which the means are of, come those of the intervals: some of each resample of the
        requests.
        """
        generator = np.random.default_rng(self.seed)
        rows_of_a_step = len(trace.geometry["layers"]) * int(trace.geometry["kv_heads"])
        steps = np.array([shard.rows // rows_of_a_step for shard in trace.shards])
        count = len(steps)
        requests = generator.integers(count, size=(self.batches, self.batch))
        if count > 1:
            resamples = generator.integers(count, size=(RESAMPLES, count))
            places = generator.integers(count, size=(RESAMPLES, AGAIN * self.batch))
            again = np.take_along_axis(resamples, places, 1).reshape(-1, self.batch)
            requests = np.concatenate([requests, again])
        return requests, generator.integers(steps[requests])


# Pages of one step of one request by layer: summed over heads of own lists and of lists rounded up, of the
# longest list, of the union, and of the context.
_ARRAYS = ("kept", "rounded", "longest", "union", "pages")


def _reads(
    own: Mapping[str, np.ndarray], shared: Mapping[str, np.ndarray], heads: int, batch: np.ndarray
) -> list[float]:
    """Return the pages that each scheme reads of a batch, over those of its contexts."""
    # Each is [batch, L].
    kept, rounded, longest, union, pages = (own[name][batch].astype(np.int64) for name in _ARRAYS)
    found = (
        kept.sum(),
        heads * longest.sum(),
        rounded.sum(),
        heads * np.minimum(longest.max(0), pages).sum(),
        heads * union.sum(),
        shared["kept"][batch].astype(np.int64).sum(),
    )
    return [float(pages_read / (heads * pages.sum())) for pages_read in found]


def _collect(trace: Trace, policy: str, drawn: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    """Return the pages of some steps by name, `[drawn, L]`, and the mean exact mass that all rows keep.

    `drawn` are requests and steps, `[drawn, 2]`, in order. What no batch draws is not kept, and the arrays
    are there from the start: the memory does not grow with the trace.
    """
    layers = [layer["layer"] for layer in trace.geometry["layers"]]
    found = {name: np.zeros((len(drawn), len(layers)), np.int32) for name in _ARRAYS}
    bounds = np.searchsorted(drawn[:, 0], np.arange(len(trace.shards) + 1))

    def work(lists: Lists) -> tuple[float, int]:
        coverage = np.where(lists.kept, lists.exact, 0).sum(-1)
        part = slice(bounds[lists.request], bounds[lists.request + 1])
        pages = _pages(lists, drawn[part, 1])
        rows = slice(layers.index(lists.layers[0]), layers.index(lists.layers[-1]) + 1)
        for name, values in pages.items():
            found[name][part, rows] = values.T
        return float(coverage.sum(dtype=np.float64)), coverage.size

    covered, counts = zip(*over_lists(trace, policy, work), strict=True)
    return found, steady(sum(covered) / sum(counts))


def _pages(lists: Lists, steps: np.ndarray) -> dict[str, np.ndarray]:
    """Return the pages of some steps, `[L, steps]`."""
    kept, pages = lists.kept[:, :, steps], lists.n_pages[:, :, steps]
    counts = kept.sum(-1)
    rounded = np.minimum(1 << np.ceil(np.log2(counts)).astype(np.int64), pages)
    found = counts.sum(1), rounded.sum(1), counts.max(1), kept.any(1).sum(-1), pages[:, 0]
    return dict(zip(_ARRAYS, found, strict=True))
