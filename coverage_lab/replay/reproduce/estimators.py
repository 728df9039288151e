"""Estimators side by side, and where those from the mean fail (paper, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coverage_lab.analyses import Finding
from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.collectors.summaries import PageSummaries
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.choice import Choice, Selector
from coverage_lab.replay.explain import explain
from coverage_lab.replay.explain import summarize as summarize_heads
from coverage_lab.replay.replay import PreparedRequest
from coverage_lab.replay.report import replay, summarize
from coverage_lab.replay.reproduce import Report, Settings, reads_and_divergence
from coverage_lab.replay.requests import Outcome, over_requests
from coverage_lab.trace import Trace
from coverage_lab.wording import counted

# Reads and KL on Llama-3.1-8B, 60 LongBench requests.
PAPER: dict[str, tuple[float | None, float | None]] = {
    "exact/coverage:0.95": (0.239, 0.00348),
    "int4/coverage:0.95": (0.241, 0.00343),
    "mvar/coverage:0.98": (0.371, 0.00441),
    "mvar/coverage:0.995": (0.617, 0.00095),
    "mean/coverage:0.98": (None, None),
}
# Log of estimated over exact mass of pages with outlying keys.
PAPER_ERRORS = {"mean": "-7 to -5", "mvar": "about -3"}
# A page has an outlying key if one key holds half of its mass; it counts if it holds so much of the head's.
DOMINANT, NOTABLE = 0.5, 0.01
# The heads are taken apart on few requests and steps: each takes a run a head.
REQUESTS_APART, STEPS_APART = 4, 16
# Heads that are named.
NAMED = 5


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """Replay the estimators, take the mean apart by KV head, and look at pages with outlying keys."""
    policies = [parse_policy(text) for text in PAPER]
    outcome = replay(trace, loaded, policies, backend=settings.backend, **settings.part("estimators"))
    lines = summarize(outcome.records, settings.seed)
    findings = reads_and_divergence(lines, PAPER)

    part = settings.part("mean_by_head")
    part["limit"] = min(REQUESTS_APART, settings.limit or REQUESTS_APART)
    part["steps"] = min(STEPS_APART, settings.steps or STEPS_APART)
    apart = explain(trace, loaded, parse_policy("mean/coverage:0.98"), **part)
    heads = [line for line in summarize_heads(apart.records, settings.seed) if line["what"] == "heads"]
    # Where every page is read no head carries anything.
    if any(line["share"] for line in heads):
        heads.sort(key=lambda line: -line["share"])
        reached = np.cumsum([line["share"] for line in heads])
        half = heads[: int(np.searchsorted(reached, 0.5)) + 1]
        apart_on = f"each alone, {counted(heads[0]['requests'], 'request')}"
        findings += [
            Finding(
                "mean/coverage:0.98: KL of the worst KV head over the sum of all",
                heads[0]["share"],
                "almost all",
                unit="share",
                note=f"{_name(heads[0])}, {apart_on}",
            ),
            Finding(
                "mean/coverage:0.98: KV heads that carry half of that sum, of all",
                len(half) / len(heads),
                unit="share",
                note=f"{len(half)} of {len(heads)}: {'; '.join(map(_name, half[:NAMED]))}",
            ),
        ]
    outlying = outlying_pages(trace, loaded, settings)
    for name, paper in PAPER_ERRORS.items():
        own = [record for record in outlying.records if record["estimator"] == name and record["pages"]]
        if own:
            pages = np.array([record["pages"] for record in own], float)
            medians = np.array([record["median"] for record in own]) * pages
            low, high = ratio_interval(medians, pages, settings.seed)
            spread = " to ".join(
                f"{np.average([record[q] for record in own], weights=pages):.1f}" for q in ("q25", "q75")
            )
            findings.append(
                Finding(
                    f"log of estimated over exact mass, pages with an outlying key: {name}",
                    float(medians.sum() / pages.sum()),
                    paper,
                    low,
                    high,
                    unit="log",
                    note=f"median; the middle half of the pages {spread}; {int(pages.sum())} pages",
                )
            )
    return Report("Estimators of the mass of a page", findings, [outcome, apart, outlying], lines)


def _name(line: dict[str, Any]) -> str:
    return f"layer {line['layer']}, KV head {line['kv_head']}"


def outlying_pages(trace: Trace, loaded: LoadedModel, settings: Settings) -> Outcome:
    """Return the outcome of a dense run: how estimates err on pages where one key holds half of the mass."""
    names = tuple(PAPER_ERRORS)

    def work(line: dict[str, Any], done: Callable[[], None]) -> list[dict[str, Any]]:
        watch = OutlyingPages(trace.page_size, names)
        request = PreparedRequest(loaded, line["prompt_ids"], line["decoded_ids"], [watch])
        request.decode_dense(choose=True)
        done()
        return [{"estimator": name, **figures} for name, figures in watch.figures().items()]

    run = {"outlying_pages": list(names), "dominant": DOMINANT, "notable": NOTABLE}
    return over_requests(trace, loaded, work, run=run, runs=1, **settings.part("outlying_pages"))


class OutlyingPages(Selector):
    """Notes, in a dense run, how estimates err on estimated pages in which one key dominates."""

    def __init__(self, page_size: int, names: tuple[str, ...]) -> None:
        super().__init__(parse_policy("exact/coverage:1"), page_size)
        self._all = {name: PageSummaries(estimators.get(name)(), page_size) for name in names}
        self._errors: list[Tensor] = []

    def see(self, call: AttentionCall, cached: int) -> None:
        held = min(cached, call.key.shape[2])
        for summaries in self._all.values():
            summaries.extend(call.layer, call.key[0, :, :held], cached - held)

    def choose(self, call: AttentionCall, cached: int) -> Choice:
        choice = super().choose(call, cached)
        block, rows = choice.block, choice.block.geometry.rows
        exact, largest = block.exact, block.to_rows(block.logits.amax(-1))
        chosen = (largest - exact > math.log(DOMINANT)) & (exact.softmax(-1) >= NOTABLE)
        # The sink and the current page are known exactly.
        chosen &= ~rows.forced(exact.shape[-1])[:, None]
        estimates = [block.estimate(summaries) for summaries in self._all.values()]
        self._errors.append(torch.stack([(estimate - exact)[chosen] for estimate in estimates]).cpu())
        return choice

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the pages noted, and the quartiles of the log error, by estimator."""
        errors = (
            torch.cat(self._errors, 1).double().numpy() if self._errors else np.empty((len(self._all), 0))
        )
        found = {}
        for name, own in zip(self._all, errors, strict=True):
            low, median, high = np.quantile(own, [0.25, 0.5, 0.75]) if len(own) else (None, None, None)
            found[name] = {"pages": len(own), "q25": low, "median": median, "q75": high}
        return found
