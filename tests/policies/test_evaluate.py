"""What policies keep of a trace, against the definitions in plain Python (tests/tools/plain.py)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
import synthetic

from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.budgets.profiled import Profile, Profiled
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.evaluate import COVERAGE_BINS, Evaluation, evaluate, policy_counts
from coverage_lab.policies.fit import GroupCounts, fit_profile, group_counts
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.trace import Trace

# Lengths differ, rows start with one page, steps cross pages, the second layer has a sliding window.
SHAPE = synthetic.Shape(
    requests=3,
    layers=3,
    kv_heads=2,
    group=3,
    steps=(5, 9, 3),
    pages=(1, 9),
    page_size=8,
    estimators=("exact", "mvar", "quest"),
    record="query-heads",
    windows={1: 20},
    seed=165,
)
TABLES = {
    "layer": Profile("layer", ((2.4,), (1.0,), (5.0,))),
    "kv_head": Profile("kv_head", ((2.4, 3.0), (1.3, 1.0), (7.0, 4.5))),
}
BUDGETS = [
    "coverage:0.5",
    "coverage:0.9",
    "coverage:0.999",
    "coverage:1",
    "fixed:1",
    "fixed:3",
    "fixed:2.6",
    "fixed:tokens=17",
    "fixed:1000",
    "proportional:0.4",
    "proportional:1",
    "threshold:0.05",
    "threshold:0",
    "delta:2",
    "delta:-0.5",
    "delta:1,sink=2,local=3",
    "delta:inf",
    "window:1",
    "window:2,sink=2",
    "coverage:0.9,dense_layers=1",
    "fixed:3,dense_layers=0+2",
]
GRANULARITIES = ["kv_head", "layer", "query_head"]


@pytest.fixture(scope="module", params=["float16", "float32"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    shape = synthetic.Shape(**{**vars(SHAPE), "share_dtype": request.param})
    return Trace(synthetic.write(tmp_path_factory.mktemp("trace") / request.param, shape))


def on(estimator: str, granularity: str) -> list[Policy]:
    """Return every budget on one estimator at one granularity."""
    made = [parse_policy(f"{estimator}/{budget}@{granularity}") for budget in BUDGETS]
    made += [
        Policy(
            estimator=estimators.get(estimator)(),
            budget=Profiled(table=table, scale=1.2),
            granularity=granularity,
        )
        for by, table in TABLES.items()
        if (granularity, by) != ("layer", "kv_head")  # a list a layer cannot have a count a head
    ]
    return made


def per_request(rows: Sequence[dict[str, Any]], key: str, requests: int) -> list[float]:
    return [math.fsum(row[key] for row in rows if row["row"].request == r) for r in range(requests)]


def assert_as_defined(trace: Trace, policies: Sequence[Policy], target: float) -> None:
    result = evaluate(trace, policies, target)
    requests = len(trace.shards)
    for column, policy in enumerate(policies):
        rows = plain.evaluate(trace, policy, target)
        for key in ("pages", "tokens", "oracle_pages", "oracle_tokens"):
            assert getattr(result, key).tolist() == per_request(rows, key, requests), key
        for key in ("kept", "kept_tokens", "covered"):
            assert getattr(result, key)[:, column].tolist() == per_request(rows, key, requests), (
                f"{policy}: {key}"
            )
        assert result.coverage[:, column] == pytest.approx(per_request(rows, "coverage", requests), rel=1e-6)
        assert result.rows.sum() == len(rows) == result.histogram[column].sum()
        coverages = [row["coverage"] for row in rows]
        for q in (0.0, 0.01, 0.05, 0.5, 1.0):
            exact = np.quantile(coverages, q, method="inverted_cdf")
            assert result.coverage_quantile(column, q) == pytest.approx(exact, abs=0.51 / COVERAGE_BINS), (
                policy
            )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("estimator", ["exact", "mvar", "quest"])
def test_evaluate_follows_the_definitions(trace: Trace, estimator: str, granularity: str) -> None:
    assert 0.95 in trace.gammas
    assert_as_defined(trace, on(estimator, granularity), 0.95)


def test_a_target_that_was_not_recorded(trace: Trace) -> None:
    assert 0.873 not in trace.gammas
    assert_as_defined(trace, on("exact", "kv_head")[:4], 0.873)


def test_the_trace_has_what_the_tests_are_about(trace: Trace) -> None:
    rows = plain.rows_of(trace)
    assert min(row.n_pages for row in rows) == 1
    assert {row.first_page > 0 for row in rows} == {True, False}
    assert len({row.n_pages for row in rows if (row.request, row.layer) == (1, 0)}) > 1
    assert any(row.position % row.page_size != row.page_size - 1 for row in rows)
    missed = [row for row in rows if row.n_pages - 1 not in plain.oracle(row.exact(), 0.873)]
    assert 0 < len(missed) < len(rows)  # oracle sets with and without the partial page


def test_oracle_counts_of_the_unrounded_shares_are_used_where_they_were_recorded(tmp_path: Path) -> None:
    # 0.94999 of 0.99999 is less than 0.95; in float16 it is 0.95020 of 1.00018, which is enough.
    made = [{"share": [[[[0.94999, 0.05]]]]}]
    for gamma, pages in ((0.95, 2), (0.9, 1)):
        path = synthetic.write_shares(
            tmp_path / str(gamma), made, prompt_tokens=5, share_dtype="float16", gammas=(gamma,)
        )
        result = evaluate(Trace(path), [parse_policy("exact/fixed:2")], 0.95)
        assert result.oracle_pages.tolist() == [pages]
        assert result.oracle_tokens.tolist() == [6 if pages == 2 else 4]


def test_splitting_a_request_into_blocks_changes_nothing(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [policy for granularity in GRANULARITIES for policy in on("mvar", granularity)[::3]]
    whole = evaluate(trace, policies)
    assert len(list(trace.blocks(["share"]))) == len(trace.shards)
    original = Trace.spans
    monkeypatch.setattr(Trace, "spans", lambda self, columns, elements=1: original(self, columns, 1))
    assert len(list(trace.blocks(["share"]))) == len(trace.shards) * SHAPE.layers
    assert_equal(evaluate(trace, policies), whole)


def assert_equal(one: Evaluation, other: Evaluation) -> None:
    for key in vars(other):
        assert np.asarray(getattr(one, key)) == pytest.approx(np.asarray(getattr(other, key))), key


def test_requests_do_not_depend_on_each_other(trace: Trace, tmp_path: Path) -> None:
    shape = synthetic.Shape(**{**vars(SHAPE), "share_dtype": trace.manifest["run"]["share_dtype"]})
    policies = [policy for granularity in GRANULARITIES for policy in on("quest", granularity)]
    whole = evaluate(trace, policies)
    for name, order in {"turned": [2, 0, 1], "alone": [1]}.items():
        part = evaluate(Trace(synthetic.write(tmp_path / name, shape, order)), policies)
        for key in ("rows", "pages", "oracle_tokens", "kept", "kept_tokens", "covered", "coverage"):
            assert getattr(part, key) == pytest.approx(getattr(whole, key)[order]), key


def test_policies_do_not_depend_on_each_other(trace: Trace) -> None:
    policies = [
        policy
        for name in ("exact", "mvar")
        for granularity in GRANULARITIES
        for policy in on(name, granularity)
    ]
    together = evaluate(trace, policies)
    for column in range(0, len(policies), 7):
        alone = evaluate(trace, policies[column : column + 1])
        for key in ("kept", "kept_tokens", "covered", "coverage"):
            assert getattr(alone, key)[:, 0] == pytest.approx(getattr(together, key)[:, column])
        assert alone.histogram[0].tolist() == together.histogram[column].tolist()


def test_every_request_may_have_its_own_policies(trace: Trace) -> None:
    choices = [on("exact", "kv_head")[1:4], on("mvar", "kv_head")[1:4], on("mvar", "layer")[3:6]]
    columns = [*choices[0], *choices[1], *choices[2]]  # so that all columns are read
    mixed = evaluate(trace, lambda request: [*columns, *choices[request]])
    for request, policies in enumerate(choices):
        alone = evaluate(trace, policies)
        for key in ("kept", "covered", "coverage"):
            assert getattr(mixed, key)[request, -3:] == pytest.approx(getattr(alone, key)[request])


def test_without_quantiles_the_rest_stays(trace: Trace) -> None:
    policies = on("mvar", "kv_head")
    with_them, without = evaluate(trace, policies), evaluate(trace, policies, realised=False)
    assert without.histogram.sum() == 0
    assert without.covered.tolist() == with_them.covered.tolist()


@pytest.mark.parametrize("call", [evaluate, policy_counts, group_counts], ids=lambda f: f.__name__)
def test_progress_tells_every_request_once(trace: Trace, call: Callable[..., Any]) -> None:
    seen: list[int] = []
    result = call(trace, [parse_policy("exact/fixed:2")], progress=seen.append)
    if call is policy_counts:
        list(result)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "policy", "option"),
    [
        ({"estimators": ("exact",)}, "mvar/coverage:0.9", "--estimators exact,mvar"),
        ({}, "exact/coverage:0.9@query_head", "--record query-heads"),
        ({"record": "counts"}, "exact/coverage:0.9", "--record shares"),
    ],
    ids=["estimator", "query heads", "counts only"],
)
def test_a_missing_column_names_the_option_that_records_it(
    tmp_path: Path, shape: dict[str, Any], policy: str, option: str
) -> None:
    path = synthetic.write(tmp_path / "t", synthetic.Shape(requests=1, layers=1, **shape))
    with pytest.raises(CoverageLabError, match=option):
        evaluate(Trace(path), [parse_policy(policy)])


@pytest.mark.parametrize("text", ["mvar/fixed:3", "mvar/proportional:0.37", "mvar/coverage:0.9"])
def test_the_heads_of_a_layer_share_one_list(trace: Trace, text: str) -> None:
    policy = parse_policy(f"{text}@layer")
    for _, _, _, _, kept in policy_counts(trace, [policy]):
        by_head = kept[:, 0].reshape(SHAPE.layers, SHAPE.kv_heads, -1)
        assert (by_head == by_head[:, :1]).all()


@pytest.mark.parametrize("estimator", ["exact", "mvar"])
@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
@pytest.mark.parametrize("covering", [None, 0.8, 0.95, 1.0])
def test_policy_counts(trace: Trace, estimator: str, granularity: str, covering: float | None) -> None:
    policies = [parse_policy(f"{estimator}/{b}@{granularity}") for b in ("coverage:0.9", "fixed:2.5")]
    found = [line for block in policy_counts(trace, policies, covering) for line in counted(*block)]
    for column, policy in enumerate(policies):
        rows = plain.evaluate(trace, policy, 0.95)
        if covering is not None:
            together = plain.siblings_of(trace)
            rows = [
                {**line, "kept": needed(policy, line["row"], together[line["row"].place], covering)}
                for line in rows
            ]
        expected = [
            (line["row"].request, line["row"].layer, line["row"].kv_head, line["row"].n_pages, line["kept"])
            for line in rows
        ]
        assert [(*line[:4], line[4][column]) for line in found] == expected


def counted(request: int, *columns: np.ndarray) -> list[Any]:
    return [(request, *line) for line in zip(*(column.tolist() for column in columns), strict=True)]


def needed(policy: Policy, row: plain.Row, siblings: Sequence[plain.Row], covering: float) -> int:
    """Return the fewest pages in the policy's order whose exact mass reaches `covering`."""
    column = "share" if policy.estimator.name == "exact" else f"share_{policy.estimator.name}"
    columns = zip(*(other.shares[column] for other in siblings), strict=True)
    shares = [math.fsum(page) for page in columns] if policy.granularity == "layer" else row.shares[column]
    for count in range(1, row.n_pages + 1):
        kept = plain.first_of(shares, count, row)
        if sum(row.exact()[page] for page in kept) >= covering - 1e-6:
            return len(kept)
    return row.n_pages


@pytest.mark.parametrize("budget", ["fixed:2.3", "proportional:0.31", "window:2.3"])
def test_fractions_are_spread_so_that_the_mean_is_exact(tmp_path: Path, budget: str) -> None:
    shape = synthetic.Shape(requests=2, layers=8, kv_heads=8, steps=40, pages=(30, 30), page_size=64)
    path = synthetic.write(tmp_path / "t", shape)
    counts = np.concatenate(
        [kept for *_, kept in policy_counts(Trace(path), [parse_policy(f"exact/{budget}")])]
    )
    asked = {"fixed:2.3": 2.3, "proportional:0.31": 9.3, "window:2.3": 3.3}[
        budget
    ]  # the window adds the sink
    assert set(counts[:, 0].tolist()) == {math.floor(asked), math.ceil(asked)}
    assert counts.mean() == pytest.approx(asked, abs=0.005)
    # Neither a layer, nor a head, nor a step has more than its part.
    grid = counts.reshape(2, 8, 8, 40)
    for axis in (1, 2, 3):
        others = tuple(a for a in range(4) if a != axis)
        assert grid.mean(others) == pytest.approx(asked, abs=0.12)


@pytest.mark.parametrize("budget", ["fixed:1e300", "window:1e300", "fixed:1e19"])
def test_a_huge_count_reads_everything(trace: Trace, budget: str) -> None:
    result = evaluate(trace, [parse_policy(f"exact/{budget}")])
    assert result.kept[:, 0].tolist() == result.pages.tolist()


def test_a_dense_layer_is_read_whole_and_no_other(trace: Trace) -> None:
    counts = [kept for *_, kept in policy_counts(trace, [parse_policy("mvar/fixed:1,dense_layers=1-2")])]
    rows = plain.rows_of(trace)
    for row, kept in zip(rows, np.concatenate(counts)[:, 0].tolist(), strict=True):
        forced = 1 + (row.first_page == 0 and row.n_pages > 1)
        assert kept == (row.n_pages if row.layer in (1, 2) else forced)


def test_a_dense_layer_that_is_not_there_is_refused(trace: Trace) -> None:
    with pytest.raises(CoverageLabError, match=r"no layer 3; it has 0 to 2"):
        evaluate(trace, [parse_policy("exact/fixed:2,dense_layers=2-3")])


# Profiles


def histogram_of(values: Sequence[Sequence[Sequence[int]]], pages: int) -> GroupCounts:
    """Return counts of values given as [layer][KV head]."""
    return GroupCounts(
        np.array(
            [[np.bincount(np.array(head, int), minlength=pages + 1) for head in layer] for layer in values],
            float,
        ),
        "",
    )


def test_group_counts_are_histograms_of_each_part(trace: Trace) -> None:
    policy = parse_policy("mvar/coverage:0.9")
    rows = plain.evaluate(trace, policy, 0.95)
    for folds in (1, 2):
        parts = group_counts(trace, [policy], folds)[policy]
        assert len(parts) == folds
        for fold, part in enumerate(parts):
            assert part.histogram.shape == (SHAPE.layers, SHAPE.kv_heads, trace.max_pages + 1)
            expected = np.zeros_like(part.histogram)
            for row in rows:
                if row["row"].request % folds == fold:
                    expected[row["row"].layer, row["row"].kv_head, row["kept"]] += 1
            assert (part.histogram == expected).all()


def test_fitted_profiles_are_means(trace: Trace, tmp_path: Path) -> None:
    policy = parse_policy("exact/coverage:0.9")
    rows = plain.evaluate(trace, policy, 0.95)
    for by in ("layer", "kv_head"):
        profile = fit_profile(trace, policy, by)
        heads = range(SHAPE.kv_heads) if by == "kv_head" else [None]
        expected = [
            [
                np.mean(
                    [
                        row["kept"]
                        for row in rows
                        if row["row"].layer == layer and head in (None, row["row"].kv_head)
                    ]
                )
                for head in heads
            ]
            for layer in range(SHAPE.layers)
        ]
        assert profile.by == by
        assert np.array(profile.counts) == pytest.approx(np.array(expected), rel=1e-12)
        assert str(policy) in profile.fitted_on["from"]
        profile.save(tmp_path / "p.json")
        assert Profile.load(tmp_path / "p.json") == profile


def test_quantiles_by_hand() -> None:
    counts = histogram_of([[[2, 2, 4, 6], [1, 1, 1, 1]], [[3, 3, 5, 9], [5, 5, 5, 5]]], 10)
    assert counts.quantile(0.5, "kv_head").counts == ((3, 1), (4, 5))
    assert counts.quantile(0.75, "kv_head").counts == ((4.5, 1), (6, 5))
    assert counts.quantile(0.0, "kv_head").counts == ((2, 1), (3, 5))
    assert counts.quantile(1.0, "kv_head").counts == ((6, 1), (9, 5))
    # Both heads of the first layer: 1 1 1 1 2 2 4 6; of the second: 3 3 5 5 5 5 5 9.
    assert counts.quantile(0.5, "layer").counts == ((1.5,), (5,))
    assert counts.quantile(1.0, "layer").counts == ((6,), (9,))


def test_quantiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).geometric(0.2, (3, 4, 37)).clip(1, 30)
    counts = histogram_of(values.tolist(), 30)
    for q in [*np.linspace(0, 1, 35), 1 / 36, 35 / 36]:
        by_head = np.array(counts.quantile(float(q), "kv_head").counts)
        assert by_head == pytest.approx(np.quantile(values, q, axis=-1), rel=1e-9)
        by_layer = np.array(counts.quantile(float(q), "layer").counts)[:, 0]
        assert by_layer == pytest.approx(np.quantile(values.reshape(3, -1), q, axis=-1), rel=1e-9)


@pytest.mark.parametrize("by", ["layer", "kv_head"])
def test_the_lowest_quantile_is_a_profile_too(by: Any) -> None:
    counts = histogram_of([[[2, 3, 4], [3, 3, 3]]], 10)
    lowest = np.array(counts.quantile(0.0, by).counts)
    assert lowest.tolist() == ([[2.0]] if by == "layer" else [[2.0, 3.0]])


def test_a_group_without_rows_has_no_count() -> None:
    counts = histogram_of([[[2, 3], [4, 4]], [[], []]], 10)
    assert counts.mean("kv_head").counts == ((2.5, 4), ())
    assert counts.quantile(1.0, "kv_head").counts == ((3, 4), ())
    assert counts.mean("layer").counts == ((3.25,), ())
    assert counts.quantile(0.0, "layer").counts == ((2,), ())


def test_a_group_without_rows_is_read_whole(trace: Trace) -> None:
    # The middle layer was not measured.
    for by, counts in {"layer": ((2.0,), (), (2.0,)), "kv_head": ((2.0, 2.0), (), (2.0, 2.0))}.items():
        policy = Policy(estimator=estimators.get("exact")(), budget=Profiled(table=Profile(by, counts)))
        kept = np.concatenate([kept for *_, kept in policy_counts(trace, [policy])])[:, 0]
        for row, count in zip(plain.rows_of(trace), kept.tolist(), strict=True):
            assert count == (row.n_pages if row.layer == 1 else min(2, row.n_pages))


@pytest.mark.parametrize(
    "profile",
    [
        Profile("layer", ((2.0,), (2.0,))),
        Profile("kv_head", ((2.0,), (2.0,), (2.0,))),
    ],
    ids=["layers", "heads"],
)
def test_a_profile_of_another_model_is_refused(trace: Trace, profile: Profile) -> None:
    policy = Policy(estimator=estimators.get("exact")(), budget=Profiled(table=profile))
    with pytest.raises(CoverageLabError, match="same model"):
        evaluate(trace, [policy])


def test_a_profile_of_heads_gives_a_shared_list_its_mean(trace: Trace) -> None:
    heads = Profile("kv_head", tuple((2.0 + layer, 5.5) for layer in range(SHAPE.layers)))
    layers = Profile("layer", tuple(((7.5 + layer) / 2,) for layer in range(SHAPE.layers)))
    shared, mean = (
        evaluate(
            trace,
            [Policy(estimator=estimators.get("mvar")(), budget=Profiled(table=table), granularity="layer")],
        )
        for table in (heads, layers)
    )
    assert_equal(shared, mean)
