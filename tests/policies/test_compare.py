"""Budgets at the same guarantee and at the same reads, recomputed from the definitions."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
import synthetic

from coverage_lab.bootstrap import resample_weights
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.budgets import budgets
from coverage_lab.policies.budgets.profiled import Profile, Profiled
from coverage_lab.policies.compare import READS_TOLERANCE, compare, given, same_guarantee, same_reads
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.evaluate import evaluate
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.trace import Trace

Record = dict[str, Any]

KEYS = {
    "table",
    "policy",
    "requested",
    "reads",
    "reads_metadata",
    "pages_over_oracle",
    "coverage_mean",
    "coverage_p5",
    "coverage_p1",
    "rows_below_target",
    "ci_low",
    "ci_high",
    "below_vs_anchor",
    "vs_anchor_low",
    "vs_anchor_high",
    "rows",
    "requests",
}
SHAPE = synthetic.Shape(requests=7, layers=3, kv_heads=2, steps=8, pages=(8, 30), seed=11)
SHARE_RULES = ["coverage", "delta", "fixed", "proportional", "threshold"]
PROFILES = ["profiled:per-layer", "profiled:per-kv_head"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("compare") / "t", SHAPE))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace of little work: exact shares of one head a layer."""
    shape = replace(SHAPE, requests=3, kv_heads=1, steps=12, estimators=("exact",))
    return Trace(synthetic.write(tmp_path_factory.mktemp("small") / "t", shape))


@pytest.fixture(scope="module")
def both(trace: Trace) -> tuple[list[Record], list[tuple[str, int, int]]]:
    """Both tables, and what they told on the way."""
    told: list[tuple[str, int, int]] = []
    return compare(trace, progress=lambda *step: told.append(step)), told


@pytest.fixture(scope="module")
def guarantee(both: tuple[list[Record], Any]) -> list[Record]:
    return [record for record in both[0] if record["table"] == "same_guarantee"]


@pytest.fixture(scope="module")
def equal_reads(both: tuple[list[Record], Any]) -> list[Record]:
    return [record for record in both[0] if record["table"] == "same_reads"]


def family(record: Record) -> str:
    """Return estimator and budget of a record, for example `mvar/profiled:per-layer`."""
    name, _, value = record["policy"].partition(":")
    return f"{name}:{value.partition(',')[0]}" if name.endswith("profiled") else name


def by_family(records: Sequence[Record]) -> dict[str, Record]:
    found = {family(record): record for record in records if record["note"] != "anchor"}
    assert len(found) == sum(record["note"] != "anchor" for record in records)
    return found


# What one row needs


def needs(trace: Trace, estimator: str, target: float) -> list[tuple[plain.Row, int]]:
    """Return how many pages every row needs, in the order of an estimate, to keep `target`."""
    column = "share" if estimator == "exact" else f"share_{estimator}"
    found = []
    for row in plain.rows_of(trace):
        for count in range(len(plain.forced(row.n_pages, row.first_page)), row.n_pages + 1):
            kept = plain.first_of(row.shares[column], count, row)
            if math.fsum(row.exact()[page] for page in kept) >= target - 1e-6:
                break
        found.append((row, count))
    return found


def profile_of(
    counts: Sequence[tuple[plain.Row, int]], by: str, part: int, summary: Callable[[list[int]], float]
) -> Profile:
    """Return a profile of one half of the requests."""
    table = []
    for layer in range(SHAPE.layers):
        groups = [range(SHAPE.kv_heads)] if by == "layer" else [[head] for head in range(SHAPE.kv_heads)]
        table.append(
            tuple(
                summary(
                    [
                        count
                        for row, count in counts
                        if row.request % 2 == part and row.layer == layer and row.kv_head in heads
                    ]
                )
                for heads in groups
            )
        )
    return Profile(by, tuple(table))


def outcome(trace: Trace, policy: Policy, part: int | None = None, target: float = 0.95) -> list[Record]:
    rows = plain.evaluate(trace, policy, target)
    return [row for row in rows if part is None or row["row"].request % 2 == part]


def on_halves(trace: Trace, estimator: str, profiles: Sequence[Profile], scale: float = 1.0) -> list[Record]:
    """Return what rows keep when each half of the requests has a profile of its own."""
    return [
        row
        for part, profile in enumerate(profiles)
        for row in outcome(
            trace,
            Policy(estimator=estimators.get(estimator)(), budget=Profiled(table=profile, scale=scale)),
            part,
        )
    ]


def enough(rows: Sequence[Record]) -> float:
    return sum(row["covered"] for row in rows) / len(rows)


def assert_describes(record: Record, rows: Sequence[Record]) -> None:
    """Check every figure of a record against what its rows keep."""
    total = {key: math.fsum(row[key] for row in rows) for key in rows[0] if key != "row"}
    coverages = [row["coverage"] for row in rows]
    assert record["rows"] == len(rows)
    assert record["reads"] == pytest.approx(total["kept"] / total["pages"], rel=1e-9)
    assert record["pages_over_oracle"] == pytest.approx(total["kept"] / total["oracle_pages"], rel=1e-9)
    assert record["tokens_over_oracle"] == pytest.approx(
        total["kept_tokens"] / total["oracle_tokens"], rel=1e-9
    )
    assert record["coverage_mean"] == pytest.approx(np.mean(coverages), rel=1e-6)
    for name, q in (("coverage_p5", 0.05), ("coverage_p1", 0.01)):
        assert record[name] == pytest.approx(np.quantile(coverages, q, method="inverted_cdf"), abs=1e-4)
    assert record["rows_below_target"] == pytest.approx(1 - enough(rows), abs=1e-9)


# Both tables


@pytest.mark.parametrize("table", ["guarantee", "equal_reads"])
def test_every_budget_on_every_estimate_is_there_once(table: str, request: pytest.FixtureRequest) -> None:
    records: list[Record] = request.getfixturevalue(table)
    expected = {f"{name}/{rule}" for name in ("exact", "mvar") for rule in [*SHARE_RULES, *PROFILES]}
    expected.add("exact/window")  # the same on any estimate
    assert set(by_family(records)) | {family(record) for record in records} == expected


@pytest.mark.parametrize("table", ["guarantee", "equal_reads"])
def test_records_have_the_keys_of_the_issue(table: str, request: pytest.FixtureRequest) -> None:
    records: list[Record] = request.getfixturevalue(table)
    for record in records:
        assert record.keys() >= KEYS
        assert record["requests"] == SHAPE.requests
        assert record["requested"] is not None
        assert 0 < record["reads"] <= 1
        assert record["coverage_p1"] <= record["coverage_p5"] <= 1
        assert record["ci_of"] in record
        if "profiled" not in record["policy"]:
            assert str(parse_policy(record["policy"])) == record["policy"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


@pytest.mark.parametrize("table", ["guarantee", "equal_reads"])
def test_metadata_is_charged(table: str, request: pytest.FixtureRequest) -> None:
    # Two vectors a page of 16 keys and 16 values. The exact mass reads all keys, a window nothing.
    for record in request.getfixturevalue(table):
        name = family(record)
        charged = {"mvar": 1 / 16, "exact": 0.0 if name == "exact/window" else 0.5}
        assert record["reads_metadata"] == charged[name.partition("/")[0]]


def test_tables_can_be_had_alone(trace: Trace, both: tuple[list[Record], Any]) -> None:
    assert [*same_guarantee(trace), *same_reads(trace)] == both[0]


def test_the_seed_decides_the_intervals_and_nothing_else(trace: Trace, equal_reads: list[Record]) -> None:
    other = same_reads(trace, seed=1)
    assert other != equal_reads
    ends = dict.fromkeys(("ci_low", "ci_high", "vs_anchor_low", "vs_anchor_high"))
    assert [record | ends for record in other] == [record | ends for record in equal_reads]


def test_progress_goes_to_the_end(both: tuple[Any, list[tuple[str, int, int]]]) -> None:
    for table in ("same guarantee", "same reads"):
        done, totals = zip(*(step[1:] for step in both[1] if step[0] == table), strict=True)
        assert len(set(totals)) == 1
        assert list(done) == list(range(1, totals[0] + 1))


# The same guarantee


def smaller(policy: Policy) -> Policy:
    """Return the policy with a slightly smaller budget."""
    budget = policy.budget
    less = {
        "coverage": lambda: {"gamma": budget.gamma - 1e-4},
        "delta": lambda: {"delta": budget.delta - 0.01},
        "fixed": lambda: {"pages": budget.pages - 0.01},
        "proportional": lambda: {"fraction": budget.fraction - 3e-4},
        "threshold": lambda: {"share": budget.share * 1.003},
        "window": lambda: {"local": budget.local - 0.01},
    }[budget.name]()
    return replace(policy, budget=replace(budget, **less))


@pytest.mark.parametrize("estimator", ["exact", "mvar"])
@pytest.mark.parametrize("rule", [*SHARE_RULES, "window"])
def test_the_smallest_budget_that_gives_the_guarantee(
    trace: Trace, guarantee: list[Record], estimator: str, rule: str
) -> None:
    if (estimator, rule) == ("mvar", "window"):
        assert "mvar/window" not in by_family(guarantee)
        return
    record = by_family(guarantee)[f"{estimator}/{rule}"]
    policy = parse_policy(record["policy"])
    rows = outcome(trace, policy)
    assert enough(rows) >= 0.9
    assert enough(outcome(trace, smaller(policy))) < 0.9
    assert_describes(record, rows)
    assert record["requested"] == getattr(policy.budget, policy.budget.primary)


@pytest.mark.parametrize("estimator", ["exact", "mvar"])
@pytest.mark.parametrize("by", ["layer", "kv_head"])
def test_profiles_hold_a_quantile_of_what_the_other_half_needs(
    trace: Trace, guarantee: list[Record], estimator: str, by: str
) -> None:
    record = by_family(guarantee)[f"{estimator}/profiled:per-{by}"]
    needed = needs(trace, estimator, 0.95)

    def at(q: float) -> list[Record]:
        profiles = [
            profile_of(needed, by, 1 - part, lambda counts: float(np.quantile(counts, q))) for part in (0, 1)
        ]
        return on_halves(trace, estimator, profiles)

    # The quantile is shown to four digits.
    found = record["requested"]
    assert enough(at(found + 2e-4)) >= 0.9
    assert enough(at(found - 3e-4)) < 0.9
    assert record["rows_below_target"] <= 0.1
    below, above = ([row["kept"] for row in at(found + step)] for step in (-3e-4, 2e-4))
    pages = sum(row["pages"] for row in at(found))
    assert sum(below) - 0.5 <= record["reads"] * pages <= sum(above) + 0.5
    assert "other half" in record["note"]


@pytest.mark.parametrize(("target", "rows"), [(0.8, 0.5), (0.99, 1.0)])
def test_other_targets(small: Trace, target: float, rows: float) -> None:
    for record in same_guarantee(small, target, rows):
        if "profiled" not in record["policy"]:
            kept = outcome(small, parse_policy(record["policy"]), target=target)
            assert enough(kept) >= rows
            assert_describes(record, kept)


def test_the_coverage_rule_needs_the_least(guarantee: list[Record]) -> None:
    read = {name: record["tokens_over_oracle"] for name, record in by_family(guarantee).items()}
    for name in ("exact", "mvar"):
        others = {rule: read[f"{name}/{rule}"] for rule in ("fixed", "proportional", *PROFILES)}
        assert read[f"{name}/coverage"] < min(others.values())
    assert 1 <= read["exact/coverage"] < read["mvar/coverage"]
    # A profile follows layers, or heads too, and needs less than one count.
    assert read["exact/profiled:per-kv_head"] < read["exact/profiled:per-layer"] < read["exact/fixed"]


def test_unlike_requests_get_the_guarantee_too(tmp_path: Path) -> None:
    """A profile of peaked requests is too small for diffuse ones: it is multiplied, and its line says so."""
    unlike = synthetic.write_shares(tmp_path / "t", [DIFFUSE, PEAKED] * 2, prompt_tokens=36)
    records = same_guarantee(Trace(unlike), 0.95, 0.9)
    assert max(record["rows_below_target"] for record in records) <= 0.1
    multiplied = [record["policy"] for record in records if "more than the largest" in record["note"]]
    assert multiplied
    assert all("profiled" in policy and "scale=" in policy for policy in multiplied)


# The same reads


def test_reads_are_those_of_the_anchor(trace: Trace, equal_reads: list[Record]) -> None:
    anchor = equal_reads[0]
    assert (anchor["policy"], anchor["note"]) == ("mvar/coverage:0.98", "anchor")
    assert_describes(anchor, outcome(trace, parse_policy("mvar/coverage:0.98")))
    for record in equal_reads[1:]:
        assert record["reads"] == pytest.approx(anchor["reads"], rel=READS_TOLERANCE)
        assert "could not be matched" not in record["note"]
        if "profiled" not in record["policy"]:
            assert_describes(record, outcome(trace, parse_policy(record["policy"])))


@pytest.mark.parametrize("estimator", ["exact", "mvar"])
@pytest.mark.parametrize("by", ["layer", "kv_head"])
def test_profiles_hold_the_mean_of_the_rule_on_the_other_half(
    trace: Trace, equal_reads: list[Record], estimator: str, by: str
) -> None:
    record = by_family(equal_reads)[f"{estimator}/profiled:per-{by}"]
    kept = [(row["row"], row["kept"]) for row in outcome(trace, parse_policy(f"{estimator}/coverage:0.98"))]
    profiles = [profile_of(kept, by, 1 - part, lambda counts: float(np.mean(counts))) for part in (0, 1)]
    assert_describes(record, on_halves(trace, estimator, profiles, record["requested"]))
    assert f"scale={record['requested']:g}" in record["policy"] or record["requested"] == 1


def test_with_exact_shares_the_coverage_rule_dominates(equal_reads: list[Record]) -> None:
    found = by_family(equal_reads)
    best = found["exact/coverage"]
    assert best["requested"] >= 0.95
    assert best["rows_below_target"] == 0
    for rule in ("fixed", "proportional", "window", *PROFILES):
        for column in ("coverage_mean", "coverage_p5", "coverage_p1"):
            assert found[f"exact/{rule}"][column] < best[column]
        assert found[f"exact/{rule}"]["rows_below_target"] > 0.1


@pytest.mark.parametrize(
    "anchor",
    ["exact/fixed:5", "exact/coverage:0.5", "exact/threshold:0.02", "exact/window:6", "exact/fixed:1"],
)
def test_other_anchors(small: Trace, anchor: str) -> None:
    records = same_reads(small, anchor)
    assert records[0]["policy"] == anchor
    for record in records[1:]:
        off = abs(record["reads"] / records[0]["reads"] - 1)
        assert (off > READS_TOLERANCE) == ("could not be matched" in record["note"])
        # One threshold moves many pages at once, and two forced pages a row are the least there is.
        assert off < 0.01 or "threshold" in record["policy"] or anchor == "exact/fixed:1"


@pytest.mark.parametrize("anchor", ["exact/coverage:0.9", "exact/fixed:7"])
def test_the_anchor_stands_there_once(small: Trace, anchor: str) -> None:
    """A second line of the same rule would differ from the anchor in the last digit of its budget alone."""
    records = same_reads(small, anchor)
    assert [family(record) for record in records].count(family(records[0])) == 1


def test_policies_have_the_dense_layers_of_the_anchor(small: Trace) -> None:
    """Policies at the same reads differ in the rule alone, or the rule is not what is compared."""
    for record in same_reads(small, "exact/coverage:0.9,dense_layers=0-1"):
        assert "dense_layers=0-1" in record["policy"]


# Halves

DIFFUSE = {"share": [[[[0.1] * 10] * 4]]}
PEAKED = {"share": [[[[0.91] + [0.01] * 9] * 4]]}


def test_no_profile_is_judged_on_the_requests_it_was_fitted_on(tmp_path: Path) -> None:
    """Diffuse requests get the counts of peaked ones, and the other way round.

    The rule keeps 9 of 10 pages of diffuse rows (0.1 each, gamma 0.9) and the 2 forced ones of peaked
    rows. A profile of the other half turns that round: the same reads, no diffuse row covered.
    """
    path = synthetic.write_shares(tmp_path / "t", [DIFFUSE, PEAKED] * 3, prompt_tokens=36)
    records = by_family(same_reads(Trace(path), "exact/coverage:0.9", 0.9))
    for by in ("layer", "kv_head"):
        record = records[f"exact/profiled:per-{by}"]
        assert record["reads"] == pytest.approx(0.55, rel=READS_TOLERANCE)
        assert record["rows_below_target"] == 0.5
        # Diffuse rows keep 2 pages of 0.1, peaked ones 0.91 + 8 * 0.01.
        assert record["coverage_mean"] == pytest.approx((0.2 + 0.99) / 2, abs=1e-6)


def test_one_request_has_no_profiles_and_no_intervals(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "t", replace(SHAPE, requests=1))
    records = compare(Trace(path))
    assert {record["table"] for record in records} == {"same_guarantee", "same_reads"}
    for record in records:
        assert "profiled" not in record["policy"]
        assert math.isnan(record["ci_low"])
        assert math.isnan(record["ci_high"])
        assert math.isfinite(record["tokens_over_oracle"])
    assert {family(record) for record in records} >= {f"mvar/{rule}" for rule in SHARE_RULES}


# Numbers by hand

# Five pages of 4 tokens, the current one with 3; two requests of one layer and two KV heads, one step.
BY_HAND = [
    {"share": [[[[8 / 16, 4 / 16, 2 / 16, 1 / 16, 1 / 16]], [[1 / 16, 8 / 16, 4 / 16, 2 / 16, 1 / 16]]]]},
    {"share": [[[[12 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 16]], [[2 / 16, 2 / 16, 2 / 16, 2 / 16, 8 / 16]]]]},
]
# C*(0.75):   {0, 1}        {1, 2}        {0}        {4, 0, 1}
# pages       2             2             1          3           = 8
# tokens      8             8             4          11          = 31
ORACLE_PAGES, ORACLE_TOKENS = 8, 31


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("by-hand") / "t"
    return Trace(synthetic.write_shares(path, BY_HAND, prompt_tokens=18, gammas=(0.5,)))


def expect(record: Record, pages: int, tokens: int, coverages: Sequence[float]) -> None:
    assert record["rows"] == 4
    assert record["reads"] == pages / 20
    assert record["pages_over_oracle"] == pages / ORACLE_PAGES
    assert record["tokens_over_oracle"] == pytest.approx(tokens / ORACLE_TOKENS, rel=1e-12)
    assert record["coverage_mean"] == pytest.approx(sum(coverages) / 4, abs=1e-6)
    assert record["coverage_p5"] == record["coverage_p1"] == pytest.approx(min(coverages), abs=1e-4)
    assert record["rows_below_target"] == sum(coverage < 0.75 for coverage in coverages) / 4


@pytest.mark.parametrize(
    ("policy", "pages", "tokens", "sixteenths"),
    [
        # Forced pages 0 and 4, then page 1; pages 1 and 2; nothing; page 1.
        pytest.param("exact/coverage:0.75", 12, 44, (13, 14, 13, 12), id="coverage"),
        # Forced pages and page 1 in every row.
        pytest.param("exact/fixed:3", 12, 44, (13, 10, 14, 12), id="fixed"),
        pytest.param("exact/fixed:tokens=9", 12, 44, (13, 10, 14, 12), id="fixed tokens"),
        pytest.param("exact/proportional:0.6", 12, 44, (13, 10, 14, 12), id="proportional"),
        # Pages 0, 3 and 4 in every row.
        pytest.param("exact/window:2", 12, 44, (10, 4, 14, 12), id="window"),
        # 0, 1, 2 and 4; all; 0 and 4; all.
        pytest.param("exact/threshold:0.125", 16, 60, (15, 16, 13, 16), id="threshold"),
        # Mean shares of the heads, in parts of 32: 9 12 6 3 2, then 14 3 3 3 9. Pages 0, 4, 1; then 0, 4.
        pytest.param("exact/coverage:0.7@layer", 10, 36, (13, 10, 13, 10), id="a list a layer"),
        pytest.param("exact/fixed:1,dense_layers=0", 20, 76, (16, 16, 16, 16), id="dense"),
    ],
)
def test_given_policies_by_hand(
    tiny: Trace, policy: str, pages: int, tokens: int, sixteenths: Sequence[int]
) -> None:
    (record,) = given(tiny, [policy], 0.75)
    expect(record, pages, tokens, [part / 16 for part in sixteenths])
    assert (record["table"], record["policy"]) == ("given", policy)
    assert record["ci_of"] == "rows_below_target"


def test_the_same_guarantee_by_hand(tiny: Trace) -> None:
    """Three of four rows keep 0.75.

    Fractions of a page are rounded by an offset of the row: 0.245 for KV head 0, 0.795 for KV head 1.
    """
    found = by_family(same_guarantee(tiny, 0.75, 0.75))
    # Up to 0.625 rows 2 and 4 stop short, then all are covered.
    expect(found["exact/coverage"], 12, 44, [13 / 16, 14 / 16, 13 / 16, 12 / 16])
    assert found["exact/coverage"]["requested"] == pytest.approx(0.625, abs=2e-4)
    # Three pages cover all but row 2; rows of KV head 0 have them from 2.755 on.
    expect(found["exact/fixed"], 12, 44, [13 / 16, 10 / 16, 14 / 16, 12 / 16])
    assert found["exact/fixed"]["requested"] == pytest.approx(2.7549, abs=1e-3)
    expect(found["exact/proportional"], 12, 44, [13 / 16, 10 / 16, 14 / 16, 12 / 16])
    assert found["exact/proportional"]["requested"] == pytest.approx(2.7549 / 5, abs=2e-4)
    # From 0.25 on row 1 has page 1, row 2 pages 1 and 2; row 4 stays short.
    expect(found["exact/threshold"], 11, 40, [13 / 16, 14 / 16, 13 / 16, 10 / 16])
    assert found["exact/threshold"]["requested"] == pytest.approx(0.25, rel=3e-3)
    # The last three pages and the sink cover all but row 2.
    expect(found["exact/window"], 16, 60, [12 / 16, 8 / 16, 15 / 16, 14 / 16])
    assert found["exact/window"]["requested"] == pytest.approx(2.7549, abs=1e-3)
    # Needs are 3 and 4, then 2 and 3 pages. Request 1 keeps quantile q of the second pair, 2 + q: short in
    # row 2 always, and in row 1 below q = 0.755. Request 2 keeps 3 + q.
    expect(found["exact/profiled:per-layer"], 14, 52, [13 / 16, 10 / 16, 15 / 16, 14 / 16])
    assert found["exact/profiled:per-layer"]["requested"] == pytest.approx(0.7549, abs=3e-4)
    # Per head one need of the other request: 2 and 3 pages where 3 and 4 are needed, and the reverse.
    # Row 2 has its 4 pages from 3 s + 0.795 = 4 on; then rows 3 and 4 have 3 and 5.
    expect(found["exact/profiled:per-kv_head"], 14, 52, [9 / 16, 14 / 16, 14 / 16, 16 / 16])
    assert found["exact/profiled:per-kv_head"]["requested"] == pytest.approx(3.205 / 3, abs=1e-3)


def test_the_same_reads_by_hand(tiny: Trace) -> None:
    """Twelve of twenty pages, as the coverage rule at 0.75 reads."""
    records = same_reads(tiny, "exact/coverage:0.75", 0.75)
    expect(records[0], 12, 44, [13 / 16, 14 / 16, 13 / 16, 12 / 16])
    found = by_family(records)
    for rule in ("fixed", "proportional"):
        expect(found[f"exact/{rule}"], 12, 44, [13 / 16, 10 / 16, 14 / 16, 12 / 16])
    expect(found["exact/window"], 12, 44, [10 / 16, 4 / 16, 14 / 16, 12 / 16])
    # A threshold reads eleven pages down to 0.125, and then sixteen.
    expect(found["exact/threshold"], 11, 40, [13 / 16, 14 / 16, 13 / 16, 10 / 16])
    assert "could not be matched" in found["exact/threshold"]["note"]
    # The rule keeps 3 and 4, then 2 and 3 pages; each request is given those of the other.
    for rule in PROFILES:
        expect(found[f"exact/{rule}"], 12, 44, [9 / 16, 10 / 16, 14 / 16, 14 / 16])


# Policies as given


def test_policies_are_evaluated_as_given(trace: Trace) -> None:
    texts = ["mvar/coverage:0.98", "exact/fixed:9", "exact/window:4,sink=2", "mvar/proportional:0.3@layer"]
    records = given(trace, texts)
    assert [record["policy"] for record in records] == texts
    assert [record["requested"] for record in records] == [0.98, 9.0, 4.0, 0.3]
    for record, text in zip(records, texts, strict=True):
        assert_describes(record, outcome(trace, parse_policy(text)))
        assert record["note"] == ""


def test_a_budget_in_tokens_shows_what_was_requested(trace: Trace) -> None:
    (record,) = given(trace, ["exact/fixed:tokens=64"])
    assert record["requested"] == 64


def test_dense_layers_read_no_estimate(trace: Trace) -> None:
    texts = ["mvar/fixed:9", "mvar/fixed:9,dense_layers=0+2", "mvar/fixed:9,dense_layers=0-2"]
    charged = [record["reads_metadata"] for record in given(trace, texts)]
    assert charged == pytest.approx([1 / 16, 1 / 16 / 3, 0])


# Intervals


def test_intervals_of_rows_below_are_those_of_a_plain_bootstrap(
    trace: Trace, equal_reads: list[Record]
) -> None:
    for record in equal_reads:
        if "profiled" in record["policy"]:
            continue
        rows = outcome(trace, parse_policy(record["policy"]))
        counts = [[row["row"].request, not row["covered"]] for row in rows]
        per_request = [
            (sum(below for place, below in counts if place == r), sum(place == r for place, _ in counts))
            for r in range(SHAPE.requests)
        ]
        generator = np.random.default_rng(7)
        drawn = generator.integers(0, SHAPE.requests, (4000, SHAPE.requests))
        sums = np.array(per_request)[drawn].sum(1)
        low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
        slack = 0.01 + 0.05 * (high - low)
        assert record["ci_low"] == pytest.approx(low, abs=slack)
        assert record["ci_high"] == pytest.approx(high, abs=slack)
        assert record["ci_low"] <= record["rows_below_target"] <= record["ci_high"]


def test_the_distance_from_the_anchor_is_paired(trace: Trace, equal_reads: list[Record]) -> None:
    """Both policies are judged on the same requests, so what requests have in common cancels out."""
    anchor = equal_reads[0]
    assert (anchor["note"], anchor["below_vs_anchor"], anchor["vs_anchor_low"]) == ("anchor", None, None)
    base = outcome(trace, parse_policy(anchor["policy"]))
    generator = np.random.default_rng(7)
    drawn = generator.integers(0, SHAPE.requests, (4000, SHAPE.requests))
    for record in equal_reads[1:]:
        assert record["below_vs_anchor"] == pytest.approx(
            record["rows_below_target"] - anchor["rows_below_target"]
        )
        if "profiled" in record["policy"]:
            continue
        rows = outcome(trace, parse_policy(record["policy"]))
        differences = np.zeros((SHAPE.requests, 2))
        for mine, its in zip(rows, base, strict=True):
            differences[mine["row"].request] += (its["covered"] - mine["covered"], 1)
        sums = differences[drawn].sum(1)
        low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
        slack = 0.01 + 0.05 * (high - low)
        assert record["vs_anchor_low"] == pytest.approx(low, abs=slack)
        assert record["vs_anchor_high"] == pytest.approx(high, abs=slack)


def resized(trace: Trace, name: str, target_rows: float, seed: int) -> tuple[float, float]:
    """Return the interval of tokens over the oracle's, the budget sized anew in every resample."""
    kind = budgets.get(name)()
    levels = np.linspace(0, 1, 1601)
    policies = [
        Policy(estimator=estimators.get("exact")(), budget=kind.at(float(level), trace.max_pages))
        for level in levels
    ]
    result = evaluate(trace, policies, realised=False)
    weights = resample_weights(len(result.rows), seed)
    covered = (weights @ result.covered) / (weights @ result.rows)[:, None]
    first = (covered >= target_rows).argmax(1)
    tokens = (weights @ result.kept_tokens)[np.arange(len(weights)), first]
    low, high = np.quantile(tokens / (weights @ result.oracle_tokens), [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("rule", ["coverage", "fixed", "proportional", "threshold"])
def test_intervals_of_the_guarantee_size_the_budget_anew(
    trace: Trace, guarantee: list[Record], rule: str
) -> None:
    record = by_family(guarantee)[f"exact/{rule}"]
    low, high = resized(trace, rule, 0.9, 0)
    assert record["ci_low"] == pytest.approx(low, abs=0.1 * (high - low) + 0.005)
    assert record["ci_high"] == pytest.approx(high, abs=0.1 * (high - low) + 0.005)


def test_intervals_hold_the_value_and_narrow_with_requests(tmp_path: Path) -> None:
    inside, widths = [], []
    for requests in (4, 16):
        shape = synthetic.Shape(
            requests=requests, layers=2, kv_heads=1, steps=3, pages=(8, 30), estimators=("exact",), seed=2
        )
        read = Trace(synthetic.write(tmp_path / f"{requests}", shape))
        records = [*same_guarantee(read), *same_reads(read, "exact/coverage:0.9")]
        inside += [record["ci_low"] <= record[record["ci_of"]] <= record["ci_high"] for record in records]
        widths.append(
            {
                (record["table"], family(record)): record["ci_high"] - record["ci_low"]
                for record in records
                if record["note"] != "anchor"
            }
        )
    assert np.mean(inside) >= 0.9
    narrower = [widths[1][key] / wide for key, wide in widths[0].items() if wide > 0]
    assert len(narrower) >= 8
    assert np.median(narrower) < 0.75  # twice as narrow, but for the noise of so few


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trace: same_guarantee(trace, 0.0), "target coverage 0.0"),
        (lambda trace: same_guarantee(trace, 0.95, 1.5), "target rows 1.5"),
        (lambda trace: same_reads(trace, target_coverage=float("nan")), "target coverage nan"),
        (lambda trace: given(trace, ["exact/fixed:3"], 2), "target coverage 2"),
        (lambda trace: given(trace, ["exact/fixd:3"]), "did you mean 'fixed'"),
        (lambda trace: same_reads(trace, "mvar"), "form estimator/budget"),
        (lambda trace: same_reads(trace, "quest/coverage:0.9"), "--estimators exact,mvar,quest"),
        (lambda trace: same_reads(trace, "mvar/coverage:0.9@query_head"), "--record query-heads"),
    ],
    ids=["coverage 0", "rows", "nan", "given target", "budget", "anchor", "estimator", "query heads"],
)
def test_bad_input_is_told_in_one_line(trace: Trace, call: Callable[[Trace], Any], message: str) -> None:
    with pytest.raises(CoverageLabError, match=message) as caught:
        call(trace)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("table", [same_guarantee, same_reads, compare], ids=lambda f: f.__name__)
def test_a_trace_of_counts_names_the_option(tmp_path: Path, table: Callable[..., Any]) -> None:
    path = synthetic.write(tmp_path / "t", replace(SHAPE, requests=2, record="counts"))
    with pytest.raises(CoverageLabError, match="--record shares"):
        table(Trace(path))


def test_a_profile_goes_beyond_the_largest_need_of_the_other_half(tmp_path: Path) -> None:
    """The second request needs more pages than the first ever did, and still gets its guarantee."""
    steep, flat = [0.97, 0.01, 0.01, 0.01, 0.0, 0.0, 0.0, 0.0], [0.125] * 8
    requests = [{"share": [[[shares]]]} for shares in (steep, flat)]
    path = synthetic.write_shares(tmp_path / "t", requests, prompt_tokens=31)
    found = by_family(same_guarantee(Trace(path), 0.95, 1.0))
    for name in PROFILES:
        record = found[f"exact/{name}"]
        assert record["rows_below_target"] == 0
        assert record["requested"] > 1
        assert "more than the largest need of the other half" in record["note"]
        assert f"scale={record['requested']:g}" in record["policy"]


def test_the_anchor_is_checked_before_any_work(trace: Trace) -> None:
    steps: list[Any] = []
    with pytest.raises(CoverageLabError, match="did you mean 'coverage'"):
        compare(trace, anchor="mvar/coverag:0.98", progress=lambda *step: steps.append(step))
    with pytest.raises(CoverageLabError, match="no column 'share_mean'"):
        compare(trace, anchor="mean/coverage:0.98", progress=lambda *step: steps.append(step))
    assert not steps


def test_without_mvar_another_estimate_is_the_anchor(tmp_path: Path) -> None:
    for estimators_held, name in ((("exact",), "exact"), (("exact", "quest"), "quest")):
        shape = replace(SHAPE, requests=2, estimators=estimators_held)
        records = same_reads(Trace(synthetic.write(tmp_path / name, shape)))
        assert records[0]["policy"] == f"{name}/coverage:0.98"
