"""The text form of policies, and their JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import Rows
from coverage_lab.policies.budgets import Budget, budgets
from coverage_lab.policies.budgets.profiled import Profile, Profiled
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.policy import GRANULARITIES, Policy, parse_policy


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty directory, so that profiles can be named without one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_profile(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Profile("layer", ((3.0,), (5.5,))).save(path)
    return path


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("mvar/coverage:0.98", None),
        ("mvar/coverage:0.980", "mvar/coverage:0.98"),
        ("mvar/coverage", "mvar/coverage:0.98"),
        ("  mvar/coverage:0.9\n", "mvar/coverage:0.9"),
        ("mvar/coverage:gamma=0.9", "mvar/coverage:0.9"),
        ("mvar/coverage:1", None),
        ("mvar/coverage:1.0", "mvar/coverage:1"),
        ("mvar/coverage:9e-1", "mvar/coverage:0.9"),
        ("mvar/coverage:0.9,method=bisection,thresholds=4", None),
        (
            "mvar/coverage:0.9,thresholds=4,method=bisection",
            "mvar/coverage:0.9,method=bisection,thresholds=4",
        ),
        ("mvar/coverage:0.9,method=sort,thresholds=8", "mvar/coverage:0.9"),
        ("mvar/coverage:method=bisection", "mvar/coverage:0.98,method=bisection"),
        ("mvar/coverage:0.9@layer", None),
        ("mvar/coverage:0.9@kv_head", "mvar/coverage:0.9"),
        ("quest/fixed:tokens=4096@query_head", None),
        ("quest/fixed:90", None),
        ("quest/fixed:90.0", "quest/fixed:90"),
        ("quest/fixed:89.5", None),
        ("quest/fixed", "quest/fixed:64"),
        ("mean/proportional:0.395", None),
        ("exact/threshold:0", None),
        ("exact/threshold:0.00001", "exact/threshold:1e-05"),
        ("exact/window:8,sink=2", None),
        ("exact/window:8,sink=1", "exact/window:8"),
        ("exact/profiled", None),
        ("exact/fixed:8,dense_layers=0-1+5", None),
        ("exact/fixed:8,dense_layers=5+1+0", "exact/fixed:8,dense_layers=0-1+5"),
        ("exact/fixed:8,dense_layers=0-3+2-5+7", "exact/fixed:8,dense_layers=0-5+7"),
        ("exact/fixed:dense_layers=3", "exact/fixed:64,dense_layers=3"),
        ("exact/fixed:8,dense_layers=2@layer", None),
        ("ffd/delta:7@query_head", None),
        ("ffd/delta", "ffd/delta:7"),
        ("ffd/delta:inf,sink=2,local=4", None),
        ("exact/coverage:0.95,page_size=1", None),
        (
            "mvar/coverage:0.95,compensate=mean,page_size=16",
            "mvar/coverage:0.95,page_size=16,compensate=mean",
        ),
        ("mvar/coverage:0.95,dense_layers=0-1,page_size=16,compensate=mean@layer", None),
        (
            "int4/coverage:0.85,page_size=1@query_head within quest/fixed:tokens=512,page_size=16@query_head",
            None,
        ),
        (
            "exact/fixed:2 within mean/fixed:5.0 within quest/fixed",
            "exact/fixed:2 within mean/fixed:5 within quest/fixed:64",
        ),
        ("mvar/coverage: 0.98 , page_size = 16", "mvar/coverage:0.98,page_size=16"),
    ],
)
def test_good_texts(text: str, canonical: str | None) -> None:
    policy = parse_policy(text)
    assert str(policy) == (canonical or text)
    assert parse_policy(str(policy)) == policy
    assert hash(parse_policy(str(policy))) == hash(policy)


def test_layers_are_written_in_order() -> None:
    # 64 comes before 3 in a set of small integers.
    policy = Policy(
        estimator=estimators.get("mvar")(), budget=budgets.get("fixed")(), dense_layers=(64, 3, 2, 3)
    )
    assert str(policy) == "mvar/fixed:64,dense_layers=2-3+64"
    assert parse_policy(str(policy)).dense_layers == (2, 3, 64)


def test_a_text_says_everything() -> None:
    policy = parse_policy("quest/coverage:0.9,method=bisection,thresholds=4,dense_layers=0+2-3@layer")
    assert policy == Policy(
        estimator=estimators.get("quest")(),
        budget=budgets.get("coverage")(gamma=0.9, method="bisection", thresholds=4),
        granularity="layer",
        dense_layers=(0, 2, 3),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "form estimator/budget"),
        ("mvar", "form estimator/budget.*try mvar/coverage:0.98"),
        ("mvar/", "form estimator/budget"),
        ("mvar:coverage:0.9", "form estimator/budget"),
        ("/coverage:0.9", "unknown estimator ''"),
        ("mvra/coverage:0.9", "unknown estimator 'mvra'; did you mean 'mvar'"),
        ("Mvar/coverage:0.9", "unknown estimator 'Mvar'; did you mean 'mvar'"),
        (
            "zzz/coverage:0.9",
            "unknown estimator 'zzz'; known: exact, ffd, int2, int4, mean, mvar, quest, sampled",
        ),
        ("mvar/converage:0.9", "unknown budget 'converage'; did you mean 'coverage'"),
        ("mvar/coverage/0.9", "unknown budget 'coverage/0.9'; did you mean 'coverage'"),
        ("mvar/top", "unknown budget 'top'"),
        ("mvar/coverage:0.9@kvhead", "unknown granularity 'kvhead'; did you mean 'kv_head'"),
        ("mvar/coverage:0.9@", "unknown granularity ''"),
        ("mvar/coverage:0", r"gamma 0.0 is not in \(0, 1\]; try"),
        ("mvar/coverage:-0.5", "gamma -0.5"),
        ("mvar/coverage:1.01", "gamma 1.01"),
        ("mvar/coverage:nan", "gamma nan"),
        ("mvar/coverage:high", "gamma='high' is no number"),
        ("mvar/coverage:0.9,", "'' is not of the form key=value"),
        ("mvar/coverage:0.9,0.8", "'0.8' is not of the form key=value"),
        ("mvar/coverage:0.9,gamma=0.8", "'gamma' is given twice"),
        (
            "mvar/coverage:0.9,tresholds=4",
            "option of coverage 'tresholds'; did you mean 'thresholds'",
        ),
        ("mvar/coverage:0.9,thresholds=3", "thresholds 3 is no power of two"),
        ("mvar/coverage:0.9,thresholds=4.5", "thresholds='4.5' is no whole number"),
        ("mvar/coverage:0.9,method=quick", "method 'quick'"),
        ("mvar/coverage:0.9,name=x", "unknown option of coverage 'name'"),
        ("mvar/fixed:0", "budget of 0.0"),
        ("mvar/fixed:nan", "budget of nan"),
        ("mvar/fixed:inf", "budget of inf"),
        ("mvar/fixed:8,tokens=512", "pages or tokens, not both"),
        ("mvar/fixed:tokens=0", "budget of 0"),
        ("mvar/fixed:tokens=1.5", "tokens='1.5' is no whole number"),
        ("mvar/proportional:0", "fraction 0.0"),
        ("mvar/proportional:1.5", "fraction 1.5"),
        ("mvar/proportional:nan", "fraction nan"),
        ("mvar/threshold:-0.1", "share -0.1"),
        ("mvar/threshold:nan", "share nan"),
        ("mvar/window:0", "local=0.0"),
        ("mvar/window:nan", "local=nan"),
        ("mvar/window:inf", "local=inf"),
        ("mvar/window:4,sink=0", "sink=0"),
        ("ffd/delta:nan", "delta: nan is no distance"),
        ("ffd/delta:-inf", "delta: -inf is no distance"),
        ("ffd/delta:7,local=0", "local=0 must be at least 1 page"),
        ("mvar/coverage:0.9,page_size=48", "page size 48 is not a power of two"),
        ("mvar/coverage:0.9,page_size=x", "page_size='x' is no whole number"),
        ("mvar/coverage:0.9,compensate=median", "unknown compensation 'median'"),
        ("mvar/coverage:0.9 within ", "that gives the candidates follows within"),
        ("exact/fixed:3 within mvar/fixed:9,compensate=mean", "compensates for nothing; leave out"),
        ("mvar/coverage:0.9 within quest/fixd:3", "unknown budget 'fixd'"),
        ("mvar/profiled:missing.json", "no profile 'missing.json'; coverage-lab fit-profile"),
        ("mvar/profiled:,scale=0", "scale 0.0"),
        ("mvar/profiled:,scale=nan", "scale nan"),
        ("mvar/profiled:x.json,table=3", "unknown option of profiled 'table'"),
        ("mvar/fixed:8,dense_layers=a", "dense_layers='a' is not like 0-1.5"),
        ("mvar/fixed:8,dense_layers=", "dense_layers='' is not like"),
        ("mvar/fixed:8,dense_layers=1+", r"dense_layers='1\+' is not like"),
        ("mvar/fixed:8,dense_layers=-1", "dense_layers='-1' is not like"),
        ("mvar/fixed:8,dense_layers=5-3", "5-3"),
        ("mvar/fixed:8,dense_layers=1,dense_layers=3", "'dense_layers' is given twice"),
        ("mvar/fixed:8,dense_layer=1", "did you mean 'dense_layers'"),
    ],
)
def test_bad_texts_are_told_in_one_line(here: Path, text: str, message: str) -> None:
    with pytest.raises(CoverageLabError, match=message) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "p.json",
        "profile",
        "a@b.json",
        "me@home/p.json",
        "v1.2@3/p.json",
        "with space.json",
        "a:b.json",
        "lr=0.1/p.json",
        "µ.json",
    ],
)
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_names_of_profile_files(here: Path, name: str, granularity: Any) -> None:
    save_profile(here / name)
    policy = Policy(
        estimator=estimators.get("mvar")(),
        budget=Profiled(profile=name, scale=1.5),
        granularity=granularity,
    )
    assert parse_policy(str(policy)) == policy
    assert policy.budget.table == Profile("layer", ((3.0,), (5.5,)))


def test_a_profile_in_the_text(here: Path) -> None:
    save_profile(here / "a@b.json")
    policy = parse_policy("mvar/profiled:a@b.json,scale=2,dense_layers=1@layer")
    assert policy.granularity == "layer"
    assert policy.budget == Profiled(profile="a@b.json", scale=2.0)
    assert str(policy) == "mvar/profiled:a@b.json,scale=2,dense_layers=1@layer"


def test_a_profile_without_a_file_is_refused_when_it_is_used() -> None:
    one = torch.tensor([1])
    rows = Rows(n_pages=one, first_page=one, position=one, layer=one, kv_head=one, page_size=64)
    with pytest.raises(CoverageLabError, match=r"profiled:FILE\.json"):
        parse_policy("mvar/profiled").budget.select(torch.ones(1, 1), rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "no coverage-lab profile"),
        ("{}", "no coverage-lab profile"),
        ('{"by": "row", "counts": [[1]]}', "no coverage-lab profile"),
        ('{"by": "layer", "counts": []}', "no coverage-lab profile"),
        ('{"by": "layer", "counts": [[]]}', "no coverage-lab profile"),
        ('{"by": "layer", "counts": [["a"]]}', "no coverage-lab profile"),
        ('{"by": "layer", "counts": 3}', "no coverage-lab profile"),
        ('{"by": "layer", "counts": [[1]], "fitted_on": "x"}', "no coverage-lab profile"),
        ("\xff", "is no JSON"),
    ],
)
def test_files_that_are_no_profile(here: Path, content: str, message: str) -> None:
    (here / "p.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CoverageLabError, match=message) as caught:
        parse_policy("mvar/profiled:p.json")
    assert "'p.json'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_profile(here: Path) -> None:
    (here / "p.json").mkdir()
    with pytest.raises(CoverageLabError, match=r"'p\.json' can't be read"):
        Profile.load("p.json")


def test_profiles_keep_where_they_come_from(here: Path) -> None:
    profile = Profile("kv_head", ((1.5, 2.0), (), (3.0, 4.25)), {"from": "a trace"})
    profile.save("p.json")
    assert Profile.load("p.json") == profile
    assert Profile.load("p.json").fitted_on == {"from": "a trace"}
    assert Profile.load(here / "p.json").table.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize("granularity", ["head", "", None])
def test_an_unknown_granularity_is_refused_by_the_constructor(granularity: Any) -> None:
    with pytest.raises(CoverageLabError, match="granularity"):
        Policy(estimator=estimators.get("mvar")(), budget=budgets.get("fixed")(), granularity=granularity)


sizes = st.one_of(st.integers(1, 10**6), st.floats(1, 1e9))
fractions = st.floats(0, 1, exclude_min=True)
tables = st.one_of(
    st.builds(
        lambda counts: Profile("layer", tuple((count,) for count in counts)),
        st.lists(st.floats(1, 1e4), min_size=1, max_size=3),
    ),
    st.builds(
        lambda counts: Profile("kv_head", tuple(counts)),
        st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=1, max_size=3),
    ),
)
in_text = st.one_of(
    st.builds(
        budgets.get("coverage"),
        gamma=fractions,
        method=st.sampled_from(["sort", "bisection"]),
        thresholds=st.sampled_from([2, 4, 8, 16]),
    ),
    st.builds(budgets.get("fixed"), pages=sizes),
    st.builds(budgets.get("fixed"), tokens=st.integers(1, 10**6)),
    st.builds(budgets.get("proportional"), fraction=fractions),
    st.builds(budgets.get("threshold"), share=st.floats(0, 1)),
    st.builds(budgets.get("window"), local=sizes, sink=st.integers(1, 9)),
    st.builds(
        budgets.get("delta"),
        delta=st.floats(-50, allow_nan=False),
        sink=st.integers(1, 9),
        local=st.integers(1, 9),
    ),
    st.builds(Profiled, scale=st.floats(1e-6, 1e6)),
)
only_in_json = st.builds(Profiled, profile=st.just("a name"), scale=st.floats(1e-6, 1e6), table=tables)


def policies(
    of: st.SearchStrategy[Budget], within: st.SearchStrategy[Policy | None] | None = None
) -> st.SearchStrategy[Policy]:
    return st.builds(
        Policy,
        estimator=st.sampled_from(estimators.names()).map(lambda name: estimators.get(name)()),
        budget=of,
        granularity=st.sampled_from(GRANULARITIES),
        dense_layers=st.sets(st.integers(0, 40)).map(lambda layers: tuple(sorted(layers))),
        page_size=st.sampled_from([None, 1, 16, 1024]),
        # Candidates are not compensated for.
        compensate=st.sampled_from([None, "mean"]) if within is None else st.none(),
        within=st.none() | policies(of, st.none()) if within is None else within,
    )


@given(policies(in_text))
def test_texts_read_back(policy: Policy) -> None:
    text = str(policy)
    assert parse_policy(text) == policy
    assert str(parse_policy(text)) == text
    assert " " not in text.replace(" within ", "")


@given(policies(st.one_of(in_text, only_in_json)))
def test_json_reads_back(policy: Policy) -> None:
    record = json.loads(json.dumps(policy.to_json()))
    assert Policy.from_json(record) == policy
    assert Policy.from_json(record).to_json() == policy.to_json()
    assert str(Policy.from_json(record)) == str(policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"estimator": "mvra"}, "did you mean 'mvar'"),
        ({"budget": "fxed"}, "did you mean 'fixed'"),
        ({"granularity": "kvhead"}, "granularity 'kvhead'"),
    ],
    ids=["estimator", "budget", "granularity"],
)
def test_json_with_an_unknown_name(change: dict[str, str], message: str) -> None:
    with pytest.raises(CoverageLabError, match=message):
        Policy.from_json(parse_policy("mvar/fixed:8").to_json() | change)
