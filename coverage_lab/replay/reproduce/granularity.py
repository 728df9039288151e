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

from coverage_lab.bootstrap import interval, resample_weights
from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import coverage_counts, rank, take
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.choice import Selector, choose
from coverage_lab.replay.replay import PreparedRequest
from coverage_lab.replay.reproduce import Finding, Report, Settings
from coverage_lab.replay.requests import over_requests
from coverage_lab.trace import Trace

GAMMA = 0.95
GRID = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995)
# The lists that the KV heads of a layer would share.
SHARED = "mvar/coverage:0.98"
PAPER_RATIO, PAPER_UNION, PAPER_OWN = 1.51, "78% to 87%", "33% to 41%"


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """See what lists of query heads cost at the error of those of KV heads, and a layer's union reads."""

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
    """Notes, at every step of a dense run, what lists of both kinds read and how far their output is off."""

    def __init__(self, page_size: int, summary_dtype: torch.dtype) -> None:
        super().__init__(parse_policy(SHARED), page_size, summary_dtype)
        self._sums: dict[tuple[str, float], Tensor | float] = {}

    def choose(self, call: AttentionCall, cached: int) -> Any:
        choice = super().choose(call, cached)
        if call.window is None and call.sinks is None:
            self._note(call, cached, choice.exact, choice.estimate, choice.rows)
        return choice

    def _note(self, call: AttentionCall, cached: int, exact: Tensor, estimate: Tensor, rows: Rows) -> None:
        heads, group, pages = exact.shape
        dense, of_page = page_outputs(call, cached, exact, self.page_size)
        own = choose(self.policy, estimate, rows, call.layer)
        self._add(("union", 0.0), own.any(0).sum() * heads, own.sum(), heads * pages)
        gammas = torch.tensor(GRID, dtype=torch.float64, device=exact.device)
        shares = exact.softmax(-1)
        of_group = [_lists(group_shares(exact), rows, gammas)] * group
        by_head = [_lists(shares[:, head], rows, gammas) for head in range(group)]
        for kind, lists in (("kv_head", of_group), ("query_head", by_head)):
            kept = torch.stack(lists, 2)  # [gammas, KV heads, G, P]
            weights = shares.where(kept, 0)
            output = (weights[..., None] * of_page).sum(-2) / weights.sum(-1, keepdim=True)
            # Relative error of a row: all of its query heads together.
            error = (output - dense).flatten(2).norm(dim=-1) / dense.flatten(1).norm(dim=-1)
            for place, gamma in enumerate(GRID):
                read = kept[place].any(1).sum()
                self._add((kind, gamma), read, error[place].sum(), heads * pages)

    def _add(self, key: tuple[str, float], *values: Tensor | float) -> None:
        parts = torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in values])
        self._sums[key] = self._sums.get(key, 0.0) + parts

    def records(self) -> list[dict[str, Any]]:
        """Return sums over rows: pages read, error (for the union: pages of the own lists), pages seen."""
        return [
            {"kind": kind, "gamma": gamma, "kept": kept, "error": error, "pages": pages}
            for (kind, gamma), sums in self._sums.items()
            for kept, error, pages in [torch.as_tensor(sums).tolist()]
        ]


def page_outputs(call: AttentionCall, cached: int, exact: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the dense output `[KV heads, G, D]`, and that of each page alone, `[KV heads, G, P, D]`."""
    keys, values = call.key[0, :, :cached].float(), call.value[0, :, :cached].float()
    query = call.query[0, :, 0].float().unflatten(0, (keys.shape[0], -1)) * call.scaling
    logits = query @ keys.mT
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    padding = -cached % page_size
    logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf).unflatten(-1, (-1, page_size))
    values = torch.nn.functional.pad(values, (0, 0, 0, padding)).unflatten(1, (-1, page_size))
    of_page = torch.einsum("hgps,hpsd->hgpd", logits.softmax(-1), values)
    return (exact.softmax(-1)[..., None] * of_page).sum(-2), of_page


def _lists(shares: Tensor, rows: Rows, gammas: Tensor) -> Tensor:
    """Return what the coverage rule keeps for each gamma, `[gammas, KV heads, P]` bool."""
    ranking = rank(shares, rows)
    counts = coverage_counts(ranking, gammas)
    return torch.stack([take(ranking, counts[:, place]) for place in range(len(gammas))])


def _findings(records: Sequence[dict[str, Any]], seed: int) -> list[Finding]:
    requests = sorted({record["request_id"] for record in records})
    if not requests:
        return []
    tables = {
        key: np.array([_of(records, request, *key) for request in requests])
        for key in [("union", 0.0), *((kind, gamma) for kind in ("kv_head", "query_head") for gamma in GRID)]
    }
    weights = resample_weights(len(requests), seed) if len(requests) > 1 else np.empty((0, 1))
    ratios = [_ratio(tables, weight) for weight in weights]
    low, high = interval(ratios)
    union = tables["union", 0.0].sum(0)
    return [
        Finding(
            f"pages for query heads over those for KV heads, at the error of exact/coverage:{GAMMA}",
            _ratio(tables, np.ones(len(requests))),
            PAPER_RATIO,
            low,
            high,
        ),
        Finding(
            f"pages in the union of all KV heads of a layer, {SHARED}",
            union[0] / union[2],
            PAPER_UNION,
            unit="share",
        ),
        Finding("pages in the lists of the KV heads", union[1] / union[2], PAPER_OWN, unit="share"),
    ]


def _of(records: Sequence[dict[str, Any]], request: str, kind: str, gamma: float) -> list[float]:
    return next(
        [record["kept"], record["error"], record["pages"]]
        for record in records
        if (record["request_id"], record["kind"], record["gamma"]) == (request, kind, gamma)
    )


def _ratio(tables: dict[tuple[str, float], np.ndarray], weights: np.ndarray) -> float:
    """Return the pages that query heads read at the error of the KV heads' lists, over what those read."""
    sums = {key: weights @ table for key, table in tables.items()}
    kept, error, _ = sums["kv_head", GAMMA]
    curve = np.array([sums["query_head", gamma][:2] for gamma in GRID])
    # Errors fall along the grid; interpolation wants them to rise.
    return float(np.exp(np.interp(np.log(error), np.log(curve[::-1, 1]), np.log(curve[::-1, 0]))) / kept)
