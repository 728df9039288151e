"""What coarser lists would read: padded, in buckets, or shared by a layer's KV heads (paper, Fig. 1c)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coverage_lab.analyses import Analysis, Finding, register
from coverage_lab.analyses.lists import Lists, over_lists
from coverage_lab.analyses.needs import steady
from coverage_lab.bootstrap import interval
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        """Return `scheme, reads, low, high, over_own, coverage_mean, paper`.

        `reads` is the pages read over those of the context, a mean over batches, `low` and `high` their
        central 95%; `over_own` is over the reads of own lists; `coverage_mean` the exact mass that rows of
        the whole trace keep, where a scheme changes it.
        """
        from coverage_lab.policies.policy import parse_policy

        asked = parse_policy(self.policy)
        if asked.granularity != "kv_head":
            raise CoverageLabError(f"policy {self.policy}: lists of KV heads are coarsened; leave out @")
        batches = self._draw(trace)
        # What no batch draws is not kept: the memory does not grow with the trace.
        wanted: dict[int, np.ndarray] = {
            int(request): np.unique(batches[1][batches[0] == request]) for request in np.unique(batches[0])
        }
        own, own_coverage = _collect(trace, self.policy, wanted)
        shared, shared_coverage = _collect(trace, str(replace(asked, granularity="layer")), wanted)
        reads = np.array([self._reads(own, shared, *drawn) for drawn in zip(*batches, strict=True)])
        mean = reads.mean(0)
        lines = []
        for place, scheme in enumerate(SCHEMES):
            low, high = interval(reads[:, place])
            lines.append(
                {
                    "scheme": scheme,
                    "reads": steady(float(mean[place])),
                    "low": steady(low),
                    "high": steady(high),
                    "over_own": steady(float(mean[place] / mean[0])),
                    "coverage_mean": {OWN: own_coverage, SUMMED: shared_coverage}.get(scheme),
                    "paper": PAPER.get((self.policy, scheme)),
                }
            )
        return pl.DataFrame(lines, infer_schema_length=None)

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        return [
            Finding(
                f"pages read, {self.policy}, {line['scheme']}",
                line["reads"],
                line["paper"],
                line["low"],
                line["high"],
                "share",
            )
            for line in table.filter(pl.col("paper").is_not_null()).to_dicts()
        ]

    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        import matplotlib.pyplot as plt
        import seaborn
        from matplotlib.ticker import PercentFormatter

        ax = ax or plt.gca()
        colours = seaborn.color_palette("colorblind")
        places = np.arange(table.height)
        ax.barh(places, table["reads"], color=[colours[1], *[colours[0]] * (table.height - 1)])
        ax.hlines(places, table["low"], table["high"], color="0.2", lw=1.5)
        for place, (reads, high) in enumerate(zip(table["reads"], table["high"], strict=True)):
            ax.text(high + 0.01, place, f"{reads:.0%}", va="center")
        ax.set_yticks(places, table["scheme"].to_list())
        ax.invert_yaxis()
        ax.set(
            xlabel=f"pages read, of the context; batches of {self.batch}",
            title=self.policy,
            xlim=(0, max(1.0, table["high"].max() * 1.1)),  # type: ignore[operator]
        )
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        seaborn.despine(ax=ax)
        return ax

    def _draw(self, trace: Trace) -> tuple[np.ndarray, np.ndarray]:
        """Return the requests of every batch and the step of each, `[batches, batch]`."""
        generator = np.random.default_rng(self.seed)
        rows_of_a_step = len(trace.geometry["layers"]) * int(trace.geometry["kv_heads"])
        steps = np.array([shard.rows // rows_of_a_step for shard in trace.shards])
        requests = generator.integers(len(steps), size=(self.batches, self.batch))
        return requests, generator.integers(steps[requests])

    def _reads(
        self,
        own: Mapping[int, _Request],
        shared: Mapping[int, _Request],
        requests: np.ndarray,
        steps: np.ndarray,
    ) -> list[float]:
        """Return the pages that each scheme reads of a batch, over those of its contexts."""
        drawn = list(zip(requests.tolist(), steps.tolist(), strict=True))

        def of_layers(of: Mapping[int, _Request], name: str) -> np.ndarray:
            return np.stack([of[request].of(name, step) for request, step in drawn]).astype(np.int64)

        heads = own[drawn[0][0]].heads
        pages, longest = of_layers(own, "pages"), of_layers(own, "longest")  # [batch, L]
        found = (
            of_layers(own, "kept").sum(),
            heads * longest.sum(),
            of_layers(own, "rounded").sum(),
            heads * np.minimum(longest.max(0), pages).sum(),
            heads * of_layers(own, "union").sum(),
            of_layers(shared, "kept").sum(),
        )
        return [float(pages_read / (heads * pages.sum())) for pages_read in found]


@dataclass
class _Request:
    """Pages of some steps by layer, `[L, steps]`: sums over heads of own lists, and of coarser ones."""

    heads: int
    steps: np.ndarray
    kept: np.ndarray
    rounded: np.ndarray
    longest: np.ndarray
    union: np.ndarray
    pages: np.ndarray

    def of(self, name: str, step: int) -> np.ndarray:
        """Return an array's column of a step, `[L]`."""
        column: np.ndarray = getattr(self, name)[:, np.searchsorted(self.steps, step)]
        return column


_ARRAYS = ("kept", "rounded", "longest", "union", "pages")


def _collect(
    trace: Trace, policy: str, wanted: Mapping[int, np.ndarray]
) -> tuple[dict[int, _Request], float]:
    """Return the pages of the wanted steps by request, and the mean exact mass that all rows keep."""
    parts: dict[int, list[_Request]] = {}
    covered, rows = 0.0, 0

    def work(lists: Lists) -> tuple[int, _Request | None, float, int]:
        coverage = np.where(lists.kept, lists.exact, 0).sum(-1)
        steps = wanted.get(lists.request)
        found = None if steps is None else _of_steps(lists, steps)
        return lists.request, found, float(coverage.sum(dtype=np.float64)), coverage.size

    for request, found, coverage, count in over_lists(trace, policy, work):
        if found is not None:
            parts.setdefault(request, []).append(found)
        covered, rows = covered + coverage, rows + count
    joined = {
        request: _Request(
            own[0].heads,
            own[0].steps,
            *(np.concatenate([getattr(part, name) for part in own]) for name in _ARRAYS),
        )
        for request, own in parts.items()
    }
    return joined, steady(covered / rows)


def _of_steps(lists: Lists, steps: np.ndarray) -> _Request:
    kept, pages = lists.kept[:, :, steps], lists.n_pages[:, :, steps]
    counts = kept.sum(-1)
    rounded = np.minimum(1 << np.ceil(np.log2(counts)).astype(np.int64), pages)
    return _Request(
        counts.shape[1],
        steps,
        counts.sum(1).astype(np.int32),
        rounded.sum(1).astype(np.int32),
        counts.max(1).astype(np.int32),
        kept.any(1).sum(-1).astype(np.int32),
        pages[:, 0].astype(np.int32),
    )
