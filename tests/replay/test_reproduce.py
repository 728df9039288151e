"""Comparisons of the paper: its figures, and ours against plain Python and float64."""

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
import torch
from tiny import DIM, GROUP, HEADS, LAYERS, record_trace, save_model, write_prompts
from torch import Tensor

from coverage_lab.cli import main
from coverage_lab.collectors.attention import AttentionCall, observed_attention
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.block import Block
from coverage_lab.replay.replay import PreparedRequest, replay_request
from coverage_lab.replay.report import CONTROL, replay, summarize
from coverage_lab.replay.reproduce import (
    Finding,
    Report,
    Settings,
    equal_reads,
    estimators,
    gamma,
    granularity,
    tpot,
)
from coverage_lab.replay.requests import Outcome, load_traced_model
from coverage_lab.trace import Trace

PAGE, STEPS = 8, 6
TASKS = {"news": (121, 150, 100), "tales": (90, 130)}
REQUESTS = sum(map(len, TASKS.values()))
RULE = "mvar/coverage:0.98"
OUTLYING = "log of estimated over exact mass, pages with an outlying key: "


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two models of one shape, and prompts of random words."""
    root = tmp_path_factory.mktemp("reproduce")
    for seed, name in enumerate(("model", "other")):
        save_model(root / name, seed, peaked=3.0)
    write_prompts(root / "tasks", TASKS)
    return root


def recorded(root: Path, name: str, **changes: Any) -> Trace:
    options = {"steps": STEPS, "page_size": PAGE, **changes}
    return record_trace(root / name, root / "model", root / "tasks", **options)


@pytest.fixture(scope="module")
def trace(root: Path) -> Trace:
    return recorded(root, "trace")


@pytest.fixture(scope="module")
def counts_only(root: Path) -> Trace:
    return recorded(root, "counts", record="counts", limit=1)


@pytest.fixture(scope="module")
def loaded(trace: Trace) -> LoadedModel:
    return load_traced_model(trace, device="cpu")


def of(findings: Sequence[Finding], start: str) -> Finding:
    """Return the one finding whose text begins so."""
    (found,) = (finding for finding in findings if finding.what.startswith(start))
    return found


def lines_of(trace: Trace) -> dict[str, dict[str, Any]]:
    return {line["request_id"]: line for line in trace.requests.to_dicts()}


# Reads and KL on Llama-3.1-8B (appendix A; with every page kept, 5.5.1).
EVERY_PAGE = {"exact/coverage:1": (1, 0.0003)}
COVERAGE = {
    "exact/coverage:0.95": (0.239, 0.00348),
    "mvar/coverage:0.98": (0.371, 0.00441),
    "mvar/coverage:0.995": (0.617, 0.00095),
}


def papers(findings: Sequence[Finding]) -> dict[str, tuple[Any, Any]]:
    """Return what the paper has for pages read and KL, by policy."""
    texts = [
        finding.what.removesuffix(": pages read") for finding in findings if "pages read" in finding.what
    ]
    found = {text: (of(findings, f"{text}: pages"), of(findings, f"{text}: KL to dense")) for text in texts}
    return {text: (reads.paper, divergence.paper) for text, (reads, divergence) in found.items()}


class TestGamma:
    @pytest.fixture(scope="class")
    def report(self, trace: Trace, loaded: LoadedModel) -> Report:
        return gamma.run(trace, loaded, Settings())

    def test_the_papers_figures(self, report: Report):
        found = papers(report.findings)
        gammas = ("0.9", "0.95", "0.98", "0.99", "0.995")
        texts = [f"{name}/coverage:{gamma}" for name in ("exact", "mvar") for gamma in gammas]
        assert list(found) == ["exact/coverage:1", *texts]
        known = {text: both for text, both in found.items() if both != (None, None)}
        assert known == EVERY_PAGE | COVERAGE

    def test_lines_are_those_of_a_replay(self, report: Report, trace: Trace, loaded: LoadedModel):
        policies = [parse_policy(text) for text in list(papers(report.findings))[1:]]
        assert repr(report.lines) == repr(summarize(replay(trace, loaded, policies).records))
        for line in report.lines:
            reads, divergence = (
                of(report.findings, f"{line['policy']}: {what}") for what in ("pages", "KL to dense")
            )
            assert (reads.ours, reads.unit) == (line["reads"], "share")
            assert (divergence.ours, divergence.unit) == (line["kl_mean"], "nats")
            assert (divergence.low, divergence.high) == (line["ci_low"], line["ci_high"])

    def test_more_coverage_reads_more_and_is_closer(self, report: Report):
        for name in ("exact", "mvar"):
            own = [line for line in report.lines[1:] if line["policy"].startswith(name)]
            reads, divergence = ([line[key] for line in own] for key in ("reads", "kl_mean"))
            assert reads == sorted(set(reads))
            assert divergence == sorted(set(divergence), reverse=True)
        assert report.lines[0]["reads"] == 1
        assert report.lines[0]["kl_mean"] <= 1e-6

    def test_some_requests_steps_and_another_seed(self, trace: Trace, loaded: LoadedModel, report: Report):
        few = gamma.run(trace, loaded, Settings(limit=2, steps=3))
        assert {(line["requests"], line["steps"]) for line in few.lines} == {(2, 6)}
        again = gamma.run(trace, loaded, Settings(seed=1))
        both = [[(f.ours, f.low, f.high) for f in one.findings[3::2]] for one in (report, again)]
        assert [ours for ours, *_ in both[0]] == [ours for ours, *_ in both[1]]
        assert both[0] != both[1]


@dataclass(frozen=True)
class Row:
    """Keys of one query head in one step, in float64."""

    logits: np.ndarray
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def pages(self) -> int:
        return -(-len(self.logits) // PAGE)

    def page(self, number: int) -> slice:
        return slice(number * PAGE, (number + 1) * PAGE)

    def mass(self, number: int) -> float:
        """Exact log mass of a page."""
        return float(np.log(np.exp(self.logits[self.page(number)]).sum()))

    def estimate(self, number: int, name: str) -> float:
        """Eq. 2 of the paper, or its first and last term; the sink and the current page are exact."""
        if number in (0, self.pages - 1):
            return self.mass(number)
        keys = self.keys[self.page(number)]
        spread = 0.5 * self.query**2 @ keys.var(0) if name == "mvar" else 0
        return float(self.query @ keys.mean(0) + spread + math.log(PAGE))

    def shares(self, name: str = "exact") -> list[float]:
        masses = [
            self.mass(page) if name == "exact" else self.estimate(page, name) for page in range(self.pages)
        ]
        weights = np.exp(np.array(masses) - max(masses))
        return [float(weight) for weight in weights / weights.sum()]

    def output(self, kept: set[int]) -> np.ndarray:
        """Attention over some pages."""
        tokens = [token for token in range(len(self.logits)) if token // PAGE in kept]
        weights = np.exp(self.logits[tokens])
        return weights / weights.sum() @ self.values[tokens]


def rows_of(call: AttentionCall, positions: Sequence[int]) -> list[list[Row]]:
    """Return the rows of a call's last tokens, step after step, each with the heads that share it."""
    query, key, value = (part[0].double().numpy() for part in (call.query, call.key, call.value))
    group, found = len(query) // len(key), []
    for place, position in enumerate(positions, query.shape[1] - len(positions)):
        for head in range(len(key)):
            keys, values = key[head, : position + 1], value[head, : position + 1]
            scaled = [call.scaling * query[head * group + member, place] for member in range(group)]
            found.append([Row(keys @ one, one, keys, values) for one in scaled])
    return found


def mean_shares(row: Sequence[Row], name: str = "exact") -> list[float]:
    return [math.fsum(page) / len(row) for page in zip(*(head.shares(name) for head in row), strict=True)]


class TestEstimators:
    @pytest.fixture(scope="class")
    def report(self, trace: Trace, loaded: LoadedModel) -> Report:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(estimators, "REQUESTS_APART", 3)
            patch.setattr(estimators, "STEPS_APART", 4)
            return estimators.run(trace, loaded, Settings())

    @pytest.fixture(scope="class")
    def errors(self, trace: Trace, loaded: LoadedModel) -> dict[tuple[str, str], np.ndarray]:
        """Log errors of estimated pages where one key holds half of the mass, by request and estimator."""
        found = {}
        for name, line in lines_of(trace).items():
            calls = list[AttentionCall]()
            ids, prompt = line["prompt_ids"] + line["decoded_ids"], line["prompt_tokens"]
            with torch.inference_mode(), observed_attention(loaded.model, calls.append):
                loaded.model(torch.tensor([ids]))
            own: dict[str, list[float]] = {"mean": [], "mvar": []}
            for call in calls:
                for row in (head for heads in rows_of(call, range(prompt, len(ids))) for head in heads):
                    weights = np.exp(row.logits)
                    for page in range(1, row.pages - 1):
                        inside = weights[row.page(page)]
                        if inside.max() > inside.sum() / 2 and inside.sum() >= 0.01 * weights.sum():
                            for kind, list_ in own.items():
                                list_.append(row.estimate(page, kind) - row.mass(page))
            found |= {(name, kind): np.array(list_) for kind, list_ in own.items()}
        return found

    def test_the_papers_figures(self, report: Report):
        wanted = {
            "exact/coverage:0.95": COVERAGE["exact/coverage:0.95"],
            "int4/coverage:0.95": (0.241, 0.00343),
            "mvar/coverage:0.98": COVERAGE["mvar/coverage:0.98"],
            "mvar/coverage:0.995": COVERAGE["mvar/coverage:0.995"],
            "mean/coverage:0.98": (None, None),
        }
        found = papers(report.findings)
        found.pop("exact/coverage:1")
        assert found == wanted
        assert of(report.findings, "mean/coverage:0.98: KL of the worst").paper == "almost all"
        for name, paper in (("mean", "-7 to -5"), ("mvar", "about -3")):
            finding = of(report.findings, OUTLYING + name)
            assert (finding.paper, finding.unit) == (paper, "log")

    def test_pages_with_an_outlying_key(self, report: Report, errors: dict[tuple[str, str], np.ndarray]):
        records = report.outcomes[2].records
        assert len(records) == len(errors) == 2 * REQUESTS
        for record in records:
            own = errors[record["request_id"], record["estimator"]]
            assert record["pages"] == len(own) > 50
            quartiles = [record[name] for name in ("q25", "median", "q75")]
            assert quartiles == pytest.approx(np.quantile(own, [0.25, 0.5, 0.75]).tolist(), abs=1e-4)

    def test_requests_weigh_by_such_pages(self, report: Report, errors: dict[tuple[str, str], np.ndarray]):
        for name in ("mean", "mvar"):
            own = [part for (_, kind), part in errors.items() if kind == name]
            pages = sum(map(len, own))
            wanted = sum(len(part) * float(np.median(part)) for part in own) / pages
            finding = of(report.findings, OUTLYING + name)
            assert finding.ours == pytest.approx(wanted, abs=1e-4)
            assert finding.low < finding.ours < finding.high
            assert f"; {pages} pages" in finding.note
        # The mean alone misses them.
        assert of(report.findings, f"{OUTLYING}mean").ours < -3

    def test_the_worst_head_of_the_mean(self, report: Report):
        records = [record for record in report.outcomes[1].records if record["what"] == "heads"]
        assert len(records) == 3 * LAYERS * HEADS
        assert {record["steps"] for record in records} == {4}
        sums: dict[tuple[int, int], float] = {}
        for record in records:
            place = record["layer"], record["kv_head"]
            sums[place] = sums.get(place, 0) + record["kl"]
        worst = max(sums, key=lambda place: sums[place])
        finding = of(report.findings, "mean/coverage:0.98: KL of the worst")
        assert finding.ours == pytest.approx(sums[worst] / sum(sums.values()))
        assert f"layer {worst[0]}, KV head {worst[1]}, each alone, 3 requests" in finding.note

    def test_heads_are_taken_apart_on_no_more_than_is_asked(self, trace: Trace, loaded: LoadedModel):
        report = estimators.run(trace, loaded, Settings(limit=1, steps=2))
        for outcome in report.outcomes:
            assert {record["request_id"] for record in outcome.records} == {"news-00000"}
        assert {record["steps"] for record in report.outcomes[1].records} == {2}

    def test_without_such_pages_there_is_no_figure(
        self, trace: Trace, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(estimators, "NOTABLE", 1.0)
        report = estimators.run(trace, loaded, Settings(limit=1, steps=1))
        assert [record["pages"] for record in report.outcomes[2].records] == [0, 0]
        assert not [finding for finding in report.findings if finding.unit == "log"]


class TestGranularity:
    POSITIONS = range(46, 50)  # the page of the last two was not filled when the first began

    @pytest.fixture(scope="class")
    def call(self) -> AttentionCall:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        return AttentionCall(
            layer=0,
            query=normal(1, 6, len(self.POSITIONS), DIM),
            key=normal(1, 2, 50, DIM),
            value=normal(1, 2, 50, DIM),
            scaling=0.8,
            window=None,
            softcap=None,
            sinks=None,
            compute=lambda: (torch.empty(1, 4, 6, DIM),),
        )

    def test_outputs_of_single_pages(self, call: AttentionCall):
        found = granularity.page_outputs(call, Block(call, 50, PAGE))
        assert found.shape == (4 * 2, 3, 7, DIM)
        for row, heads in enumerate(rows_of(call, self.POSITIONS)):
            for member, head in enumerate(heads):
                for page in range(7):
                    wanted = head.output({page}) if page < head.pages else np.zeros(DIM)
                    assert found[row, member, page].numpy() == pytest.approx(wanted, abs=1e-5)

    def records(self, call: AttentionCall, calls: int = 1) -> dict[tuple[str, float], dict[str, float]]:
        selector = granularity.Granularities(PAGE, torch.float32)
        for _ in range(calls):
            selector.choose(call, 50)
        return {(record["kind"], record["gamma"]): record for record in selector.records()}

    def test_pages_and_errors_of_both_kinds_of_lists(self, call: AttentionCall):
        found, rows = self.records(call), rows_of(call, self.POSITIONS)
        assert len(found) == 1 + 2 * len(granularity.GRID)
        errors = set()
        for gamma_ in granularity.GRID:
            sums = {"kv_head": [0.0, 0.0], "query_head": [0.0, 0.0]}
            for row in rows:
                together = [plain.coverage(mean_shares(row), gamma_)] * len(row)
                apart = [plain.coverage(head.shares(), gamma_) for head in row]
                dense = np.stack([head.output(set(range(head.pages))) for head in row])
                for kind, lists in (("kv_head", together), ("query_head", apart)):
                    outputs = [head.output(kept) for head, kept in zip(row, lists, strict=True)]
                    sums[kind][0] += len(set.union(*lists))
                    sums[kind][1] += float(np.linalg.norm(outputs - dense) / np.linalg.norm(dense))
            for kind, (kept, error) in sums.items():
                record = found[kind, gamma_]
                assert (record["kept"], record["pages"]) == (kept, 2 * (6 + 6 + 7 + 7))
                assert record["error"] == pytest.approx(error, rel=1e-4, abs=1e-5)
                errors.add(round(error, 3))
        assert len(errors) > len(granularity.GRID)

    def test_the_union_of_the_heads_of_a_layer(self, call: AttentionCall):
        rows = rows_of(call, self.POSITIONS)
        own = [plain.coverage(mean_shares(row, "mvar"), 0.98) for row in rows]
        union = sum(2 * len(own[place] | own[place + 1]) for place in range(0, len(own), 2))
        record = self.records(call)["union", 0.0]
        assert (record["kept"], record["error"], record["pages"]) == (union, sum(map(len, own)), 52)
        assert union > sum(map(len, own))

    def test_calls_add_up(self, call: AttentionCall):
        once, twice = self.records(call), self.records(call, 2)
        for key, record in once.items():
            for name in ("kept", "error", "pages"):
                assert twice[key][name] == pytest.approx(2 * record[name])

    def test_windows_and_sinks_are_left_out(self, call: AttentionCall):
        assert self.records(replace(call, window=22)) == {}
        assert self.records(replace(call, sinks=torch.zeros(6))) == {}

    def made_up(self, factors: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
        """Query heads read 50 / sqrt(error) pages; requests differ by a factor on pages and on errors."""
        found = []
        for request, (pages, errors) in factors.items():
            common = {"request_id": request, "task": "t", "pages": 1000.0}
            found.append(common | {"kind": "union", "gamma": 0.0, "kept": 800.0 * pages, "error": 300.0})
            for place, gamma_ in enumerate(granularity.GRID):
                error = 10 ** (-place / 4)
                of_heads = {
                    "kind": "query_head",
                    "kept": pages * 50 / math.sqrt(error),
                    "error": error * errors,
                }
                # At 0.95, and there alone, an error between two of the grid.
                of_group = {"kind": "kv_head", "kept": 90.0, "error": 0.03 if gamma_ == 0.95 else 0.5}
                found += [common | {"gamma": gamma_} | record for record in (of_heads, of_group)]
        return found

    def report(self, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Report:
        outcome = Outcome(records, {}, 0)
        monkeypatch.setattr(granularity, "over_requests", lambda *given, **options: outcome)
        trace: Any = type("Traced", (), {"page_size": PAGE})()
        layer = type("Layer", (), {"window": None, "sinks": False})()
        loaded: Any = type("Loaded", (), {"layers": (layer,)})()
        return granularity.run(trace, loaded, Settings())

    def test_pages_at_the_same_error_lie_between_those_of_the_grid(self, monkeypatch: pytest.MonkeyPatch):
        (ratio, union, own) = self.report(self.made_up({"a": (1, 1)}), monkeypatch).findings
        assert ratio.ours == pytest.approx(50 / math.sqrt(0.03) / 90)
        assert math.isnan(ratio.low)
        assert (union.ours, own.ours) == (0.8, 0.3)

    def test_requests_are_summed_and_resampled(self, monkeypatch: pytest.MonkeyPatch):
        records = self.made_up({"a": (1, 1), "b": (0.5, 2)})
        (ratio, union, _) = self.report(records, monkeypatch).findings
        # 0.06 of error is 0.02 of the errors of both, 1.5 of the pages and 180 of those of the KV heads.
        assert ratio.ours == pytest.approx(1.5 * 50 / math.sqrt(0.06 / 3) / 180)
        ends = [50 / math.sqrt(0.03) / 90, 0.5 * 50 / math.sqrt(0.03 / 2) / 90]
        assert (ratio.low, ratio.high) == (pytest.approx(min(ends)), pytest.approx(max(ends)))
        assert union.ours == pytest.approx(1200 / 2000)

    def test_the_papers_figures(self, monkeypatch: pytest.MonkeyPatch):
        """Sections 2.2.1 and 5.5.3."""
        findings = self.report(self.made_up({"a": (1, 1)}), monkeypatch).findings
        assert [(finding.paper, finding.unit) for finding in findings] == [
            (1.51, "ratio"),
            ("78% to 87%", "share"),
            ("33% to 41%", "share"),
        ]
        assert "exact/coverage:0.95" in findings[0].what
        assert RULE in findings[1].what

    def test_on_a_trace(self, trace: Trace, loaded: LoadedModel):
        """The lists of the dense run's queries are those of the trace."""
        report = granularity.run(trace, loaded, Settings())
        ratio, union, own = report.findings
        assert {record["request_id"] for record in report.outcomes[0].records} == set(lines_of(trace))
        lists = {
            place: [kept_of(trace, row) for row in rows] for place, rows in plain.siblings_of(trace).items()
        }
        pages = HEADS * sum(row.n_pages for rows in plain.siblings_of(trace).values() for row in rows[:1])
        # Shares were rounded when they were recorded, which may move a page in a thousand.
        assert own.ours == pytest.approx(
            sum(len(kept) for found in lists.values() for kept in found) / pages, abs=2e-3
        )
        assert union.ours == pytest.approx(
            HEADS * sum(len(set.union(*found)) for found in lists.values()) / pages, abs=2e-3
        )
        assert 1 < ratio.ours < GROUP
        assert ratio.low <= ratio.ours <= ratio.high


def kept_of(trace: Trace, row: plain.Row) -> set[int]:
    return plain.keep(parse_policy(RULE), row, plain.siblings_of(trace)[row.place], GROUP)


class TestEqualReads:
    """Anchors `mvar/coverage:0.98` and `exact/coverage:0.95`, each with the others on its estimate."""

    ANCHORS = (RULE, "exact/coverage:0.95")
    FAMILIES = ("fixed", "profiled:per-layer", "profiled:per-kv_head", "proportional")

    @pytest.fixture(scope="class")
    def ran(self, trace: Trace, loaded: LoadedModel) -> tuple[Report, Callable[[int], list[Policy]]]:
        """The report, and from the place of a request to the policies that were matched."""
        given = []

        def noted(trace: Trace, loaded: LoadedModel, policies: Any, **options: Any) -> Outcome:
            given.append(policies)
            return replay(trace, loaded, policies, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(equal_reads, "replay", noted)
            report = equal_reads.run(trace, loaded, Settings())
        anchors, policies_of = given
        assert [str(policy) for policy in anchors] == list(self.ANCHORS)
        return report, policies_of

    def records(self, report: Report) -> list[dict[str, Any]]:
        """Of both runs; the control ran in each."""
        rule, others = report.outcomes
        return rule.records + [record for record in others.records if record["policy"] != CONTROL]

    def test_policies_read_as_much_as_the_anchor_did(self, trace: Trace, ran: Any):
        report, policies_of = ran
        reads = []
        for policies in zip(policies_of(0), policies_of(1), strict=True):
            kept = pages = 0
            for half, policy in enumerate(policies):
                own = [
                    line for line in plain.evaluate(trace, policy, 0.95) if line["row"].request % 2 == half
                ]
                kept += sum(line["kept"] for line in own)
                pages += sum(line["pages"] for line in own)
            reads.append(kept / pages)
        assert len(reads) == 2 * len(self.FAMILIES)
        lines = {line["policy"]: line for line in report.lines}
        for anchor, start in zip(self.ANCHORS, (0, 4), strict=True):
            assert 0.3 < lines[anchor]["reads"] < 0.7
            assert reads[start : start + 4] == pytest.approx([lines[anchor]["reads"]] * 4, rel=0.02)

    def test_profiles_are_those_of_the_other_half(self, trace: Trace, ran: Any):
        _, policies_of = ran
        checked = 0
        for anchor, start in zip(self.ANCHORS, (0, 4), strict=True):
            kept: dict[tuple[int, int, int], list[int]] = {}
            for line in plain.evaluate(trace, parse_policy(anchor), 0.95):
                row = line["row"]
                kept.setdefault((row.request % 2, row.layer, row.kv_head), []).append(line["kept"])
            for place in range(REQUESTS):
                other = 1 - place % 2
                for policy in policies_of(place)[start : start + 4]:
                    if policy.budget.name != "profiled":
                        continue
                    for layer, counts in enumerate(policy.budget.table.counts):
                        heads = [kept[other, layer, head] for head in range(HEADS)]
                        wanted = [sum(own) / len(own) for own in heads]
                        if policy.budget.table.by == "layer":
                            wanted = [sum(wanted) / HEADS]
                        assert list(counts) == pytest.approx(wanted)
                        # The request's own half would give others.
                        heads = [kept[1 - other, layer, head] for head in range(HEADS)]
                        own = [sum(part) / len(part) for part in heads]
                        assert sum(counts) / len(counts) != pytest.approx(sum(own) / HEADS)
                        checked += 1
        assert checked == 2 * REQUESTS * 2 * LAYERS

    def test_every_request_runs_under_the_profiles_of_its_place(
        self, trace: Trace, loaded: LoadedModel, ran: Any
    ):
        """Tasks come in turn, so that a request is not run in the order of its place."""
        report, policies_of = ran
        records = {(record["request_id"], record["policy"]): record for record in self.records(report)}
        differs = 0
        for place, (name, line) in enumerate(lines_of(trace).items()):
            for number, policy in enumerate(policies_of(place)):
                if policy.budget.name != "profiled":
                    continue
                both = [policy, policies_of(place + 1)[number]]
                found, other = replay_request(loaded, line["prompt_ids"], line["decoded_ids"], both, PAGE)
                record = records[name, str(policies_of(0)[number])]
                assert record["kept"] == found.counts["kept"]
                assert record["kl_mean"] == pytest.approx(float(found.kl.mean()))
                differs += found.counts["kept"] != other.counts["kept"]
        assert differs > REQUESTS

    def test_ratios_are_those_of_the_records(self, ran: Any):
        report, policies_of = ran
        pairs = [
            (anchor, str(policy))
            for anchor, start in zip(self.ANCHORS, (0, 4), strict=True)
            for policy in policies_of(0)[start : start + 4]
        ]
        self.check(report, pairs)
        names = [finding.what for finding in report.findings[::2]]
        assert names == [
            f"KL of {anchor} over {anchor.partition('/')[0]}/{family}"
            for anchor in self.ANCHORS
            for family in self.FAMILIES
        ]
        assert repr(report.lines) == repr(summarize(self.records(report)))
        runs = [(record["request_id"], record["policy"]) for record in report.joined().records]
        assert len(runs) == len(set(runs)) == REQUESTS * len(report.lines)

    def check(self, report: Report, pairs: Sequence[tuple[str, str]]) -> None:
        for number, pair in enumerate(pairs):
            mine, theirs = (
                {record["request_id"]: record for record in self.records(report) if record["policy"] == text}
                for text in pair
            )
            sums = [sum(r["kl_mean"] * r["steps"] for r in own.values()) for own in (mine, theirs)]
            reads = [
                sum(r["kept"] for r in own.values()) / sum(r["pages"] for r in own.values())
                for own in (mine, theirs)
            ]
            lower = sum(mine[request]["kl_mean"] < theirs[request]["kl_mean"] for request in mine)
            ratio, share = report.findings[2 * number : 2 * number + 2]
            assert ratio.ours == pytest.approx(sums[0] / sums[1])
            assert ratio.low <= ratio.ours <= ratio.high
            apart = abs(reads[1] / reads[0] - 1) > 0.02
            assert ratio.note == f"reads {reads[0]:.1%} and {reads[1]:.1%}" + ", not equal" * apart
            assert (share.ours, share.unit) == (pytest.approx(lower / len(mine)), "share")
            assert share.note == f"{lower} of {len(mine)}"

    def test_requests_weigh_by_their_steps(
        self, trace: Trace, loaded: LoadedModel, ran: Any, monkeypatch: pytest.MonkeyPatch
    ):
        """Made-up records of two requests: one is long and close, the other short and far."""
        pairs, real, whole = [], ran[0].outcomes[0].records[0], trace

        def stand_in(trace: Trace, loaded: LoadedModel, policies: Any, **options: Any) -> Outcome:
            records = []
            anchors = not callable(policies)
            for place, policy in enumerate(policies if anchors else policies(0)):
                # As if all ran at once, each anchor before its four.
                number = 5 * place if anchors else place + place // 4 + 1
                base = {**real, "policy": str(policy), "pages": 100}
                names = [shard.request_id for shard in whole.shards[:2]]
                far = 0.5 - 0.2 * (number in (0, 5))
                for request, steps, divergence in zip(names, (30, 2), (0.1, far), strict=True):
                    divergence += 0.01 * number
                    kl = {"kl_mean": divergence, "kl": [divergence] * steps, "kept": 10 + number}
                    records.append({**base, "request_id": request, "steps": steps, **kl})
                if not anchors:
                    pairs.append((self.ANCHORS[number // 5], str(policy)))
            return Outcome(records, {}, 0)

        monkeypatch.setattr(equal_reads, "replay", stand_in)
        report = equal_reads.run(trace, loaded, Settings())
        self.check(report, pairs)
        assert report.findings[0].ours == pytest.approx((30 * 0.1 + 2 * 0.3) / (30 * 0.11 + 2 * 0.51))

    @pytest.mark.parametrize("steps", [1, 2, STEPS + 5])
    def test_reads_are_matched_on_the_steps_that_run(self, trace: Trace, loaded: LoadedModel, steps: int):
        report = equal_reads.run(trace, loaded, Settings(steps=steps))
        reads = {line["policy"]: line["reads"] for line in report.lines}
        for anchor in self.ANCHORS:
            estimator = anchor.partition("/")[0]
            others = [value for policy, value in reads.items() if policy.startswith(f"{estimator}/")]
            assert len(others) == 1 + len(self.FAMILIES) + (estimator == "exact")  # and the control
            others = [value for value in others if value < 1]
            assert others == pytest.approx([reads[anchor]] * len(others), rel=0.005)

    def test_a_run_goes_on_with_more_requests_and_after_a_failure(
        self, trace: Trace, loaded: LoadedModel, ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Whatever ran before, the report is that of an unbroken run, and requests are told by name."""
        for name in "ab":
            (tmp_path / name).mkdir()
        few = equal_reads.run(trace, loaded, Settings(directory=tmp_path / "a", limit=3))
        assert len({record["request_id"] for record in few.outcomes[1].records}) == 3
        failing = trace.requests["request_id"][0]

        def scarce(loaded: LoadedModel, prompt: Sequence[int], *rest: Any) -> Any:
            if list(prompt) == lines_of(trace)[failing]["prompt_ids"]:
                raise torch.OutOfMemoryError("no memory")
            return PreparedRequest(loaded, prompt, *rest)

        with monkeypatch.context() as patch:
            patch.setattr("coverage_lab.replay.replay.PreparedRequest", scarce)
            broken = equal_reads.run(trace, loaded, Settings(directory=tmp_path / "b"))
        assert set(broken.outcomes[0].failed) == {failing}
        kl = {
            (record["policy"], record["request_id"]): record["kl_mean"] * record["steps"]
            for record in self.records(broken)
        }
        for line in broken.lines[2:]:
            requests = {request for policy, request in kl if policy == line["policy"]}
            assert failing not in requests
            beyond = [kl[line["policy"], request] - kl[RULE, request] for request in requests]
            assert line["lower"] == pytest.approx(np.mean(np.array(beyond) < 0))
        for name in "ab":
            again = equal_reads.run(trace, loaded, Settings(directory=tmp_path / name))
            assert again.findings == ran[0].findings

    def test_a_run_goes_on_with_fewer_requests(self, root: Path, loaded: LoadedModel, tmp_path: Path):
        """The same policies are matched to them where all read every page."""
        write_prompts(root / "few-tasks", {"notes": (4, 5, 6)})
        few = record_trace(root / "few", root / "model", root / "few-tasks", steps=2, page_size=PAGE)
        for limit in (3, 2, 3):
            report = equal_reads.run(few, loaded, Settings(directory=tmp_path, limit=limit))
            assert {line["requests"] for line in report.lines} == {limit}

    def test_where_every_page_is_read_nothing_is_compared(self, ran: Any):
        record = {"request_id": "a", "kl_mean": 1e-12, "steps": 2, "kept": 8, "pages": 8}
        records = [{**record, "policy": policy} for policy in (RULE, "mvar/fixed:9")]
        ratio, lower = equal_reads._against(records, RULE, "mvar/fixed:9", 0)
        assert np.isnan([ratio.ours, ratio.low, lower.ours]).all()
        assert (ratio.note, lower.note) == ("every page is read: nothing to compare", "")

    def test_the_papers_figures(self, ran: Any):
        """Section 5.5.2: 0.37 times that of proportional top-k, and lower on every request."""
        known = {
            number: finding.paper
            for number, finding in enumerate(ran[0].findings)
            if finding.paper is not None
        }
        assert known == {6: 0.37, 7: 1.0}
        assert ran[0].findings[6].what == f"KL of {RULE} over mvar/proportional"


class TestTimePerToken:
    """What needs no GPU."""

    CPU = torch.device("cpu")

    def test_it_needs_a_gpu(self, trace: Trace, loaded: LoadedModel):
        with pytest.raises(CoverageLabError, match="need a GPU") as error:
            tpot.run(trace, loaded, Settings())
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("tokens", [50, 400])
    def test_prompts_are_those_of_the_trace_end_to_end(self, trace: Trace, tokens: int):
        prompts = tpot._prompts(trace, tokens)
        assert [len(prompt) for prompt in prompts] == [tokens] * 8
        stream = [token for line in trace.requests.to_dicts() for token in line["prompt_ids"]]
        found = [token for prompt in prompts for token in prompt]
        assert (len(found) > len(stream)) == (tokens == 400)
        assert found == [stream[place % len(stream)] for place in range(8 * tokens)]

    def test_shares_are_those_that_rows_of_the_trace_keep(self, trace: Trace):
        found = tpot.kept_shares(trace)
        assert len(found) == LAYERS
        for layer, own in enumerate(found):
            rows = [row for row in plain.rows_of(trace) if row.layer == layer]
            wanted = [len(kept_of(trace, row)) / row.n_pages for row in rows]
            assert own.tolist() == pytest.approx(wanted)

    def test_shares_that_were_not_recorded(self, counts_only: Trace):
        with pytest.raises(CoverageLabError, match="has no column 'share'; collect it with --record shares"):
            tpot.kept_shares(counts_only)

    def test_counts_are_drawn_at_the_same_depth(self):
        shares = [np.array([0.1, 0.2]), np.array([1e-4, 1.0]), np.array([0.5])]
        counts = tpot._counts_like(shares, 4, 128, self.CPU, seed=0)
        assert list(counts) == list(range(32))
        # 32 layers on 3 of the trace.
        drawn = [{13, 26}] * 11 + [{1, 128}] * 11 + [{64}] * 10
        for layer, wanted in enumerate(drawn):
            assert counts[layer].shape == (4, 8)
            assert counts[layer].dtype == torch.int64
            assert set(counts[layer].flatten().tolist()) == wanted
        again, other = (tpot._counts_like(shares, 4, 128, self.CPU, seed) for seed in (0, 1))
        assert all(torch.equal(again[layer], counts[layer]) for layer in counts)
        assert not torch.equal(other[0], counts[0])

    def test_counts_of_a_trace_are_from_one_page_to_all(self, trace: Trace):
        shares = tpot.kept_shares(trace)
        for pages in (1, 3, 1024):
            counts = torch.stack(list(tpot._counts_like(shares, 2, pages, self.CPU, 0).values()))
            assert counts.min() >= 1
            assert counts.max() <= pages

    def test_the_papers_figures(self):
        """Table 3, Llama-3.1-8B: dense FA3 and the coverage rule in ms, and their ratio."""
        table = {
            (8192, 32): (12.66, 9.18, 1.38),
            (32768, 16): (16.46, 8.71, 1.89),
            (65536, 8): (19.56, 7.45, 2.62),
        }
        assert table == tpot.PAPER_8B
        timed = {
            tpot.SDPA: tpot.Timed(30.0, 1.0, 0.0),
            tpot.EVERY: tpot.Timed(20.0, 1.0, 1e-4),
            tpot.RULE: tpot.Timed(8.0, 0.25, 0.01),
        }
        for shape, (dense, rule, ratio) in table.items():
            found = tpot._findings("shape", timed, tpot.PAPER_8B[shape])
            assert [(finding.ours, finding.paper) for finding in found[:3]] == [
                (30, None),
                (20, dense),
                (8, rule),
            ]
            assert {finding.unit for finding in found[:3]} == {"ms"}
            assert [finding.ours for finding in found[3:]] == [30 / 8, 20 / 8]
            assert found[3].paper is None
            assert found[4].paper == ratio
            assert found[4].note == "the rule reads 25.0%, 0.01 nats from SDPA"
        assert not [finding for finding in tpot._findings("own", timed, None) if finding.paper is not None]

    def test_every_arm_sees_the_same_random_keys(self):
        first, again = (tpot._random_keys(2, 16, self.CPU)[""].layers for _ in range(2))
        assert len(first) == tpot.SHAPE_8B["num_hidden_layers"]
        drawn = [tensor for layer in first for tensor in (layer.keys, layer.values)]
        assert {tensor.shape for tensor in drawn} == {(2, 8, 16, 128)}
        same = [tensor for layer in again for tensor in (layer.keys, layer.values)]
        assert all(torch.equal(mine, its) for mine, its in zip(drawn, same, strict=True))
        assert len({tuple(tensor.flatten()[:8].tolist()) for tensor in drawn}) == len(drawn)

    def test_arms_that_say_something_else_are_refused(self):
        generator = torch.Generator().manual_seed(0)
        dense = 3 * torch.randn(4, 50, generator=generator)
        near = {tpot.SDPA: dense, tpot.EVERY: dense + 0.01, tpot.RULE: dense.clone()}
        near[tpot.RULE][:, 0] += 1
        apart = tpot.check(near)
        assert [apart[tpot.SDPA], apart[tpot.EVERY]] == pytest.approx([0, 0], abs=1e-6)
        p, q = (near[name].double().softmax(-1) for name in (tpot.SDPA, tpot.RULE))
        assert apart[tpot.RULE] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
        other = 3 * torch.randn(4, 50, generator=generator)
        for name, wrong in (
            (tpot.EVERY, other),
            (tpot.EVERY, dense * torch.nan),
            (tpot.RULE, dense * torch.nan),
        ):
            with pytest.raises(CoverageLabError, match="nats from dense SDPA"):
                tpot.check(near | {name: wrong})
        # An estimate that fails on a model is no fault of the kernels: it stands in the table.
        assert tpot.check(near | {tpot.RULE: other})[tpot.RULE] > 1


@pytest.mark.parametrize("comparison", [estimators, equal_reads, granularity])
def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(
    comparison: Any, trace: Trace, loaded: LoadedModel, tmp_path: Path
):
    told, stop_at = list[tuple[str, int, int]](), [10**9]

    def progress(request: str, done: int, all_: int) -> None:
        told.append((request, done, all_))
        if len(told) == stop_at[0]:
            raise KeyboardInterrupt

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
    report = comparison.run(trace, loaded, Settings(directory=whole, progress=progress))
    wanted, calls = {file.name: file.read_bytes() for file in whole.iterdir()}, len(told)
    assert len(wanted) == len(report.outcomes)
    for part in (0.3, 0.7):
        told.clear()
        stop_at[0] = int(calls * part)
        with pytest.raises(KeyboardInterrupt):
            comparison.run(trace, loaded, Settings(directory=parts, progress=progress))
    stop_at[0] = 10**9
    again = comparison.run(trace, loaded, Settings(directory=parts, progress=progress))
    assert {file.name: file.read_bytes() for file in parts.iterdir()} == wanted
    assert repr(again) == repr(report)


def test_outcomes_are_told_as_one():
    outcomes = [
        Outcome([{"request_id": "a", "degenerate": True}], {"b": "no memory"}, 2),
        Outcome([{"request_id": "c", "degenerate": False}], {"d": "no room"}, 1),
    ]
    joined = Report("t", [], outcomes).joined()
    assert joined.failed == {"b": "no memory", "d": "no room"}
    assert (joined.degenerate, joined.empty, len(joined.records)) == (["a"], 2, 2)
    assert Report("t", []).joined() == Outcome([], {}, 0)


class TestCommand:
    @pytest.fixture
    def run(
        self, trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[Any, str, str]]:
        def command(name: str, *arguments: Any, on: Trace = trace) -> tuple[Any, str, str]:
            given = ["coverage-lab", "reproduce", name, str(on.path), "--device", "cpu", *map(str, arguments)]
            monkeypatch.setattr("sys.argv", given)
            with pytest.raises(SystemExit) as stop:
                main()
            said = capsys.readouterr()
            return stop.value.code, said.out, said.err

        return command

    def test_json_alone(self, run: Any, root: Path, trace: Trace, loaded: LoadedModel):
        code, out, err = run("gamma", "--json", "-", "--limit", 4, "--seed", 3)
        assert (code, err) == (0, "")
        document = json.loads(out)
        report, other = (gamma.run(trace, loaded, Settings(limit=4, seed=seed)) for seed in (3, 0))
        assert document["requests"] == 4
        assert document["asked"] == {"limit": 4, "steps": None, "seed": 3}
        assert document["title"] == report.title
        assert document["model"]["model"] == str(root / "model")
        assert (document["model"]["dtype"], document["model"]["device"]) == ("float32", "cpu")
        assert document["machine"]["versions"]["torch"] == metadata.version("torch")
        assert len(document["runs"]) == 4 * len(document["lines"])
        assert len({run["request_id"] for run in document["runs"]}) == 4
        assert [line["kl_mean"] for line in document["lines"]] == [line["kl_mean"] for line in report.lines]
        assert document["lines"][0]["vs_first"] is None  # JSON has no NaN
        found = [(line["what"], line["ours"], line["low"]) for line in document["records"][1::2]]
        assert found == [(finding.what, finding.ours, finding.low) for finding in report.findings[1::2]]
        assert found != [(finding.what, finding.ours, finding.low) for finding in other.findings[1::2]]
        assert {line["low"] for line in document["records"][::2]} == {None}

    @pytest.mark.parametrize(
        ("name", "texts"),
        [
            (
                "gamma",
                ("The coverage rule over gamma", "23.9%", "0.003", "mvar/coverage:0.995: KL to dense"),
            ),
            ("estimators", ("Estimators of the mass", "almost all", "-7 to -5", "KL of the worst KV head")),
            ("equal-reads", ("at equal reads", "0.37", "100.0%", "mvar/profiled:per-kv_head", "2 of 2")),
            ("granularity", ("Who shares a list", "1.51", "78% to 87%", "33% to 41%")),
        ],
    )
    def test_a_table_has_the_papers_figures_beside_ours(self, run: Any, name: str, texts: Sequence[str]):
        code, out, err = run(name, "--limit", 2)
        assert (code, err) == (0, "")
        assert ", 2 requests" in out
        for text in (*texts, "paper", "ours"):
            assert text in out
        assert "nan" not in out

    @pytest.mark.parametrize("name", ["estimators", "equal-reads", "granularity"])
    def test_where_every_page_is_read_there_is_nothing_to_compare(self, run: Any, root: Path, name: str):
        """A request of one page."""
        path = root / "short"
        if not path.exists():
            write_prompts(root / "short-tasks", {"notes": (4,)})
            record_trace(path, root / "model", root / "short-tasks", steps=2, page_size=PAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            code, out, err = run(name, on=Trace(path))
        assert (code, err) == (0, "")
        assert "nan" not in out
        assert "KL of the worst KV head" not in out
        if name != "estimators":
            assert {"equal-reads": "nothing to compare", "granularity": "no list drops a page"}[name] in out
            ratio = next(line for line in out.splitlines() if "0.37" in line or "1.51" in line)
            assert re.search(r"(0\.37|1\.51) +- +- ", ratio)

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_run_that_is_stopped_says_what_is_kept(
        self, run: Any, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def stop(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("coverage_lab.replay.replay.PreparedRequest", stop)
        code, out, err = run("gamma", *(("-o", tmp_path) if kept else ()))
        assert (code, out) == (130, "")
        said = "goes on from what is in" if kept else "nothing was kept: -o keeps finished requests"
        assert said in err

    def test_csv_takes_texts_and_numbers(self, run: Any, tmp_path: Path):
        code, out, _ = run("granularity", "--limit", 1, "--csv", tmp_path / "f.csv")
        assert code == 0
        assert "1.51" in out
        lines = (tmp_path / "f.csv").read_text().splitlines()
        assert lines[0] == "what,ours,paper,low,high,unit,note"
        assert [line.count("78% to 87%") for line in lines] == [0, 0, 1, 0]

    def test_what_is_finished_is_kept(self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        arguments = ("estimators", "--limit", 1, "--json", "-", "-o", tmp_path / "a" / "kept")
        first = run(*arguments)
        assert first[0] == 0
        files = {"estimators.jsonl", "mean_by_head.jsonl", "outlying_pages.jsonl"}
        assert {file.name for file in (tmp_path / "a" / "kept").iterdir()} == files
        for module in ("replay", "explain", "reproduce.estimators"):
            monkeypatch.setattr(f"coverage_lab.replay.{module}.PreparedRequest", None)
        assert run(*arguments) == first
        code, out, err = run("estimators", "--limit", 1, "--steps", 2, "-o", tmp_path / "a" / "kept")
        assert (code, out) == (2, "")
        assert "holds another replay (steps); give another --output" in err

    def test_a_request_that_fails_is_named(self, run: Any, monkeypatch: pytest.MonkeyPatch):
        prepared = granularity.PreparedRequest

        def scarce(loaded: LoadedModel, prompt: Sequence[int], *rest: Any) -> Any:
            if len(prompt) == TASKS["tales"][0]:
                raise torch.OutOfMemoryError("no memory\nfor that")
            return prepared(loaded, prompt, *rest)

        monkeypatch.setattr(granularity, "PreparedRequest", scarce)
        code, out, err = run("granularity", "--limit", 3)
        assert code == 1
        assert ", 2 requests" in out
        assert err == "tales-00000 failed: no memory for that\n"

    def test_wrong_input_is_one_line(self, run: Any, root: Path, counts_only: Trace, tmp_path: Path):
        (tmp_path / "file").write_text("")
        for name, arguments, message in (
            ("gama", (), "No such command 'gama'"),
            ("gamma", ("--limit", 0), "--limit"),
            ("gamma", ("--model", root / "other"), "are not those that"),
            ("gamma", ("--backend", "cuda"), "backend 'cuda' is not reference or triton"),
            ("gamma", ("-o", tmp_path / "file"), f"{tmp_path / 'file'} is a file; give a directory with -o"),
            ("gamma", ("-o", tmp_path / "file" / "a"), f"can't make {tmp_path / 'file' / 'a'}"),
            ("gamma", ("--json", tmp_path / "a", "--csv", tmp_path / "a"), "a is named for two outputs"),
            ("gamma", ("--json", tmp_path / "a", "-o", tmp_path / "a"), "a is named for two outputs"),
            ("gamma", ("--json", tmp_path), f"{tmp_path} is a directory; name a file in it"),
            ("tpot", ("--limit", 1), "No such option: --limit"),
            ("tpot", ("-o", tmp_path / "kept"), "No such option: -o"),
            ("granularity", ("--backend", "triton"), "No such option: --backend"),
            ("gamma", ("--json", tmp_path / "none" / "f.json"), "make it first"),
            ("tpot", (), "times per token need a GPU"),
        ):
            code, out, err = run(name, *arguments)
            assert (code, out) == (2, ""), name
            assert message in err
            assert err.count("\n") == 1
        code, out, err = run("equal-reads", on=counts_only)
        assert (code, out) == (2, "")
        assert err == f"error: {counts_only.path} has no column 'share'; collect it with --record shares\n"

    def test_what_was_recorded_on_counts_can_still_be_replayed(self, run: Any, counts_only: Trace):
        code, out, _ = run("gamma", "--steps", 1, on=counts_only)
        assert code == 0
        assert ", 2 requests" in out
