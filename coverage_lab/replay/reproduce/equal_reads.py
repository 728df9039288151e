"""The coverage rule against other budgets that read as much (paper, 5.5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coverage_lab.analyses import Finding
from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.policies.compare import matched
from coverage_lab.policies.evaluate import PoliciesOf
from coverage_lab.replay.report import replay, summarize
from coverage_lab.replay.reproduce import Report, Settings
from coverage_lab.trace import Trace

BUDGETS = ("fixed", "proportional", "profiled")
ANCHORS = ("mvar/coverage:0.98", "exact/coverage:0.95")
# KL of the anchor over that of the other, Llama-3.1-8B, 60 LongBench requests; lower on every one of them.
PAPER = {("mvar/coverage:0.98", "mvar/proportional"): 0.37}
PAPER_LOWER = {("mvar/coverage:0.98", "mvar/proportional"): 1.0}


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """Match every budget to the reads of the coverage rule on the trace, then replay all of them.

    Profiles are fitted on one half of the requests and run on the other.
    """

    def matching(what: str, done: int, total: int) -> None:
        settings.progress(f"matching {what}", done, total)

    families = {anchor: matched(trace, anchor, BUDGETS, matching) for anchor in ANCHORS}
    outcome = replay(
        trace, loaded, _together(families), backend=settings.backend, **settings.part("equal_reads")
    )
    findings = []
    for anchor, policies_of in families.items() if outcome.records else ():
        for policy in policies_of(0)[1:]:
            findings += _against(outcome.records, anchor, str(policy), settings.seed)
    lines = summarize(outcome.records, settings.seed)
    return Report("The coverage rule at equal reads", findings, [outcome], lines)


def _together(families: dict[str, PoliciesOf]) -> PoliciesOf:
    return lambda place: [policy for policies_of in families.values() for policy in policies_of(place)]


def _against(records: Sequence[dict[str, Any]], anchor: str, other: str, seed: int) -> list[Finding]:
    """Return the anchor's divergence over another policy's, and on how many requests it is lower."""
    kl = {
        name: {r["request_id"]: r["kl_mean"] * r["steps"] for r in records if r["policy"] == name}
        for name in (anchor, other)
    }
    reads = {
        name: sum(r["kept"] for r in records if r["policy"] == name)
        / sum(r["pages"] for r in records if r["policy"] == name)
        for name in (anchor, other)
    }
    requests = sorted(kl[anchor])
    mine, theirs = (np.array([kl[name][request] for request in requests]) for name in (anchor, other))
    low, high = ratio_interval(mine, theirs, seed)
    family = other.partition(":")[0]
    if family.endswith("profiled"):
        family = other.partition(",")[0]
    key = anchor, family
    return [
        Finding(
            f"KL of {anchor} over {family}",
            float(mine.sum() / theirs.sum()),
            PAPER.get(key),
            low,
            high,
            note=f"reads {reads[anchor]:.1%} and {reads[other]:.1%}",
        ),
        Finding(
            f"  lower than {family} on so many requests",
            float(np.mean(mine < theirs)),
            PAPER_LOWER.get(key),
            unit="share",
            note=f"{int((mine < theirs).sum())} of {len(mine)}",
        ),
    ]
