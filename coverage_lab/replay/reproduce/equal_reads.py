"""The coverage rule against other budgets that read as much (paper, 5.5.2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coverage_lab.analyses import Finding
from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.policies.compare import matched
from coverage_lab.policies.evaluate import PoliciesOf, needed_columns
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.report import CONTROL, replay, summarize
from coverage_lab.replay.reproduce import Report, Settings
from coverage_lab.replay.requests import Outcome
from coverage_lab.trace import Trace

TITLE = "The coverage rule at equal reads"
BUDGETS = ("fixed", "proportional", "profiled")
ANCHORS = ("mvar/coverage:0.98", "exact/coverage:0.95")
# Reads that count as equal, relative: a sparse run's queries read a little more, or less, than was matched.
NEAR = 0.02
# KL of the anchor over that of the other, Llama-3.1-8B, 60 LongBench requests; lower on every one of them.
PAPER = {("mvar/coverage:0.98", "mvar/proportional"): 0.37}
PAPER_LOWER = {("mvar/coverage:0.98", "mvar/proportional"): 1.0}


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """Run the rule, match every budget to what it read on the requests that ran, then run those.

    Profiles are fitted on one half of the requests and run on the other.
    """
    trace.require(needed_columns([parse_policy(anchor) for anchor in ANCHORS], trace))

    def matching(what: str, done: int, total: int) -> None:
        settings.progress(f"matching {what}", done, total)

    def played(policies: Sequence[Policy] | PoliciesOf, part: str, on: Trace) -> Outcome:
        return replay(on, loaded, policies, backend=settings.backend, **settings.part(part))

    rule = played([parse_policy(anchor) for anchor in ANCHORS], "equal_reads_rule", trace)
    if not rule.records:
        return Report(TITLE, [], [rule])
    # The queries of a sparse run choose a little more, or less, than those of the dense one.
    ran = trace.only({record["request_id"] for record in rule.records}, settings.steps)
    families = {
        anchor: matched(ran, anchor, BUDGETS, matching, reads=_reads(rule.records, anchor))
        for anchor in ANCHORS
    }
    together = _together(families)
    others = played(together, f"equal_reads_{_digest(together, ran)}", ran)
    records = _joined(rule.records, others.records)
    findings = []
    for anchor, policies_of in families.items() if others.records else ():
        for policy in policies_of(0)[1:]:
            findings += _against(records, anchor, str(policy), settings.seed)
    others = replace(others, records=[record for record in others.records if record["policy"] != CONTROL])
    return Report(TITLE, findings, [rule, others], summarize(records, settings.seed))


def _digest(policies_of: PoliciesOf, ran: Trace) -> str:
    """Return what tells this run from one of more requests, or fewer, to which others may be matched."""
    texts = [[policy.to_json() for policy in policies_of(part)] for part in (0, 1)]
    requests = [shard.request_id for shard in ran.shards]
    return hashlib.sha256(json.dumps([texts, requests]).encode()).hexdigest()[:8]


def _joined(rule: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of the requests that ran under all policies, the control once."""
    both = {record["request_id"] for record in others}
    first = [record for record in rule if record["request_id"] in both]
    return first + [record for record in others if record["policy"] != CONTROL]


def _reads(records: Sequence[dict[str, Any]], policy: str) -> float:
    own = [record for record in records if record["policy"] == policy]
    return float(sum(record["kept"] for record in own) / sum(record["pages"] for record in own))


def _together(families: dict[str, PoliciesOf]) -> PoliciesOf:
    """Return the policies that were matched, without the anchors."""
    return lambda place: [policy for policies_of in families.values() for policy in policies_of(place)[1:]]


def _apart(reads: float, other: float) -> str:
    """Return what both read, and a word where that is not equal: whole pages can't make any part."""
    return f"reads {reads:.1%} and {other:.1%}" + ("" if abs(other / reads - 1) <= NEAR else ", not equal")


def _against(records: Sequence[dict[str, Any]], anchor: str, other: str, seed: int) -> list[Finding]:
    """Return the anchor's divergence over another policy's, and on how many requests it is lower."""
    kl = {
        name: {r["request_id"]: r["kl_mean"] * r["steps"] for r in records if r["policy"] == name}
        for name in (anchor, other)
    }
    reads = {name: _reads(records, name) for name in (anchor, other)}
    requests = sorted(kl[anchor])
    mine, theirs = (np.array([kl[name][request] for request in requests]) for name in (anchor, other))
    low = high = float("nan")
    family = other.partition(":")[0]
    if family.endswith("profiled"):
        family = other.partition(",")[0]
    key = anchor, family
    ratio, lower, note = float("nan"), float("nan"), "every page is read: nothing to compare"
    if min(reads.values()) < 1:
        low, high = ratio_interval(mine, theirs, seed)
        ratio, lower = float(mine.sum() / theirs.sum()), float(np.mean(mine < theirs))
        note = _apart(reads[anchor], reads[other])
    return [
        Finding(f"KL of {anchor} over {family}", ratio, PAPER.get(key), low, high, note=note),
        Finding(
            f"  lower than {family} on so many requests",
            lower,
            PAPER_LOWER.get(key),
            unit="share",
            note="" if np.isnan(lower) else f"{int((mine < theirs).sum())} of {len(mine)}",
        ),
    ]
