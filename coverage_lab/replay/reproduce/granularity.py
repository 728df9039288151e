"""Who shares a list: pages for query heads, KV heads and layers at the same error (paper 2.2 and 5.5.3).

The queries are those of a dense run. The error is that of the attention's output, relative to its norm, with
every head reading its own list alone; what is read is the union of the lists of those that share keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coverage_lab.analyses import Finding
from coverage_lab.bootstrap import interval, resample_weights
from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import coverage_counts, rank, take
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.block import Block
from coverage_lab.replay.choice import Choice, Selector
from coverage_lab.replay.replay import PreparedRequest
from coverage_lab.replay.reproduce import Report, Settings
from coverage_lab.replay.requests import over_requests
from coverage_lab.trace import Trace

GAMMA = 0.95
GRID = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995)
# The lists that the KV heads of a layer would share.
SHARED = "mvar/coverage:0.98"
PAPER_RATIO, PAPER_UNION, PAPER_OWN = 1.51, "78% to 87%", "33% to 41%"


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """See what lists of query heads cost at the error of those of KV heads, and a layer's union reads.

    Layers with sliding windows or sink logits are left out.
    """
    if all(layer.window or layer.sinks for layer in loaded.layers):
        raise CoverageLabError(
            "granularity needs layers with full attention and without sink logits; the model has none"
        )

    def work(line: dict[str, Any], done: Callable[[], None]) -> list[dict[str, Any]]:
        selector = Granularities(trace.page_size, loaded.model.dtype)
        request = PreparedRequest(loaded, line["prompt_ids"], line["decoded_ids"], [selector])
        request.decode_dense(choose=True)
        done()
        return selector.records()

    run_of = {"granularity": list(GRID), "shared": SHARED}
    outcome = over_requests(trace, loaded, work, run=run_of, runs=1, **settings.part("granularity"))
    return Report("Who shares a list", _findings(outcome.records, settings.seed), [outcome])


class Granularities(Selector):
    """Notes, in a dense run, what lists of both kinds read and how far their output is off."""

    def __init__(self, page_size: int, summary_dtype: torch.dtype) -> None:
        super().__init__(parse_policy(SHARED), page_size, summary_dtype)
        self._sums: dict[tuple[str, float], Tensor] = {}

    def choose(self, call: AttentionCall, cached: int) -> Choice:
        choice = super().choose(call, cached)
        if call.window is None and call.sinks is None:
            self._note(call, choice)
        return choice

    def _note(self, call: AttentionCall, choice: Choice) -> None:
        block, rows, exact = choice.block, choice.block.geometry.rows, choice.block.exact
        heads, group = call.key.shape[1], exact.shape[1]
        pages = rows.n_pages.sum()
        union = choice.kept.unflatten(0, (-1, heads)).any(1).sum() * heads
        self._add(("union", 0.0), union, choice.kept.sum(), pages)
        shares, of_page = exact.softmax(-1), page_outputs(call, block)
        dense = (shares[..., None] * of_page).sum(-2)
        of_group = _Lists(group_shares(exact), rows)
        by_head = [_Lists(shares[:, head], rows) for head in range(group)]
        for kind, lists in (("kv_head", [of_group] * group), ("query_head", by_head)):
            for place, gamma in enumerate(GRID):
                kept = torch.stack([one.kept(place) for one in lists], 1)  # [rows, G, P]
                weights = shares.where(kept, 0)
                output = torch.einsum("rgp,rgpd->rgd", weights, of_page) / weights.sum(-1, keepdim=True)
                # Relative error of a row: all of its query heads together.
                error = (output - dense).flatten(1).norm(dim=-1) / dense.flatten(1).norm(dim=-1)
                self._add((kind, gamma), kept.any(1).sum(), error.sum(), pages)

    def _add(self, key: tuple[str, float], *values: Tensor) -> None:
        parts = torch.stack([value.double() for value in values])
        self._sums[key] = self._sums[key] + parts if key in self._sums else parts

    def records(self) -> list[dict[str, Any]]:
        """Return sums over rows: pages read, error (for the union: pages of the own lists), pages seen."""
        return [
            {"kind": kind, "gamma": gamma, "kept": kept, "error": error, "pages": pages}
            for (kind, gamma), sums in self._sums.items()
            for kept, error, pages in [sums.tolist()]
        ]


def page_outputs(call: AttentionCall, block: Block) -> Tensor:
    """Return the output of each page alone, `[rows, G, P, D]`; of layers with full attention."""
    padding = (0, 0, 0, block.logits.shape[-2] * block.page_size - block.cached)
    values = torch.nn.functional.pad(call.value[0, :, : block.cached].float(), padding)
    weights = block.logits.softmax(-1).nan_to_num()  # a page that a step does not see has no weights
    found = torch.einsum("hgtps,hpsd->hgtpd", weights, values.unflatten(1, (-1, block.page_size)))
    return found.permute(2, 0, 1, 3, 4).flatten(0, 1)


class _Lists:
    """What the coverage rule keeps for each gamma of the grid."""

    def __init__(self, shares: Tensor, rows: Rows) -> None:
        gammas = torch.tensor(GRID, dtype=torch.float64, device=shares.device)
        self._ranking = rank(shares, rows)
        self._counts = coverage_counts(self._ranking, gammas)

    def kept(self, place: int) -> Tensor:
        """`[rows, P]` bool, for one gamma."""
        return take(self._ranking, self._counts[:, place])


def _findings(records: Sequence[dict[str, Any]], seed: int) -> list[Finding]:
    requests = sorted({record["request_id"] for record in records})
    if not requests:
        return []
    tables = {
        key: np.array([_of(records, request, *key) for request in requests])
        for key in [("union", 0.0), *((kind, gamma) for kind in ("kv_head", "query_head") for gamma in GRID)]
    }
    weights = resample_weights(len(requests), seed) if len(requests) > 1 else np.empty((0, 1))
    low, high = interval([_ratio(tables, weight) for weight in weights])
    found = _ratio(tables, np.ones(len(requests)))
    union = tables["union", 0.0].sum(0)
    return [
        Finding(
            f"pages for query heads over those for KV heads, at the error of exact/coverage:{GAMMA}",
            found,
            PAPER_RATIO,
            low,
            high,
            note="" if np.isfinite(found) else "no list drops a page here",
        ),
        Finding(
            f"pages in the union of all KV heads of a layer, {SHARED}",
            float(union[0] / union[2]),
            PAPER_UNION,
            unit="share",
        ),
        Finding("pages in the lists of the KV heads", float(union[1] / union[2]), PAPER_OWN, unit="share"),
    ]


def _of(records: Sequence[dict[str, Any]], request: str, kind: str, gamma: float) -> list[float]:
    return next(
        [record["kept"], record["error"], record["pages"]]
        for record in records
        if (record["request_id"], record["kind"], record["gamma"]) == (request, kind, gamma)
    )


def _ratio(tables: dict[tuple[str, float], np.ndarray], weights: np.ndarray) -> float:
    """Return the pages that query heads read at the error of the KV heads' lists, over what those read.

    NaN where there is no error.
    """
    sums = {key: weights @ table for key, table in tables.items()}
    kept, error, _ = sums["kv_head", GAMMA]
    curve = np.array([sums["query_head", gamma][:2] for gamma in GRID])
    curve = curve[curve[:, 1] > 0]
    if not (error > 0 and len(curve)):
        return float("nan")
    # Errors fall along the grid; interpolation wants them to rise.
    return float(np.exp(np.interp(np.log(error), np.log(curve[::-1, 1]), np.log(curve[::-1, 0]))) / kept)
