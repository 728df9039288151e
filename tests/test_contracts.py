"""What every registered estimator and budget must do; a new one is tested here without an edit."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import synthetic
import torch
from torch import Tensor

from coverage_lab.kernels.select.reference import Ranking, rank, take
from coverage_lab.pages import Rows
from coverage_lab.policies import budgets as budgets_package
from coverage_lab.policies import estimators as estimators_package
from coverage_lab.policies.budgets import Budget, budgets
from coverage_lab.policies.budgets.profiled import Profile, Profiled
from coverage_lab.policies.compare import same_guarantee, same_reads
from coverage_lab.policies.estimators import Estimator, Summary, estimators
from coverage_lab.policies.evaluate import evaluate, policy_counts
from coverage_lab.policies.policy import GRANULARITIES, Policy, parse_policy
from coverage_lab.trace import Trace

LAYERS, HEADS = 3, 2
LEVELS = np.linspace(0, 1, 33).tolist()
PROFILE = Profile("kv_head", ((3.0, 5.5), (2.0, 9.0), (1.0, 4.25)))

every_estimator = pytest.mark.parametrize("estimator", estimators.names())
every_budget = pytest.mark.parametrize("budget", budgets.names())
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
every_part = pytest.mark.parametrize(
    "part",
    [estimators.get(name) for name in estimators.names()] + [budgets.get(name) for name in budgets.names()],
    ids=[*estimators.names(), *budgets.names()],
)


def make(budget: str) -> Budget:
    """Return a budget with its defaults; the profiled one needs its profile."""
    found = budgets.get(budget)()
    return dataclasses.replace(found, table=PROFILE) if isinstance(found, Profiled) else found


def block(seed: int = 0, device: str = "cpu", padding: float = 0.0) -> tuple[Tensor, Rows]:
    """Return ragged shares without ties, and their geometry: rows of one page, rows that lost their sink."""
    generator = np.random.default_rng(seed)
    n_pages = np.array([1, 1, 2, 2, 3, 7, 12, 25, 40, 40, 33, 39])
    first_page = np.array([0, 4, 0, 4, 0, 0, 9, 0, 0, 0, 2, 0])
    width = int(n_pages.max())
    shares = np.full((len(n_pages), width), padding, np.float32)
    for row, count in enumerate(n_pages):
        drawn = generator.lognormal(0, 1.5, count)
        shares[row, :count] = drawn / drawn.sum()
        assert len(np.unique(shares[row, :count])) == count
    places = np.arange(len(n_pages))
    geometry = {
        "n_pages": n_pages,
        "first_page": first_page,
        "position": (first_page + n_pages) * 16 - 1 - places % 5,
        "layer": places % LAYERS,
        "kv_head": places % HEADS,
    }
    tensors = {name: torch.from_numpy(values).to(device) for name, values in geometry.items()}
    return torch.from_numpy(shares).to(device), Rows(**tensors, page_size=16)


def pages_of(seed: int = 0, pages: int = 6, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return scaled queries `[heads, G, D]` and keys `[heads, P, S, D]`."""
    generator = torch.Generator().manual_seed(seed)
    query = 0.3 * torch.randn(HEADS, 3, 16, generator=generator)
    keys = torch.randn(HEADS, pages, 8, 16, generator=generator)
    keys += torch.randn(HEADS, pages, 1, 16, generator=generator)
    return query.to(device), keys.to(device)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace with every registered estimator and every query head."""
    others = tuple(name for name in estimators.names() if name != "exact")
    shape = synthetic.Shape(
        requests=2,
        layers=LAYERS,
        kv_heads=HEADS,
        steps=4,
        pages=(2, 9),
        estimators=("exact", *others),
        record="query-heads",
        share_dtype="float32",
    )
    return Trace(synthetic.write(tmp_path_factory.mktemp("contracts") / "t", shape))


# Every part


@every_part
def test_is_a_frozen_keyword_only_dataclass(part: type[Any]) -> None:
    assert dataclasses.is_dataclass(part)
    assert all(field.kw_only for field in dataclasses.fields(part))
    made = part()
    with pytest.raises(TypeError):
        part(1)
    for name in [field.name for field in dataclasses.fields(part)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 1)
    assert made == part()
    assert hash(made) == hash(part())


@every_part
def test_says_what_it_is_and_where_it_comes_from(part: type[Any]) -> None:
    for text in (part.title, part.source, inspect.getdoc(part) or ""):
        assert text == text.strip()
        assert len(text) > 3
    assert "\n" not in part.title + part.source
    registry = estimators if issubclass(part, Estimator) else budgets
    assert registry.get(part.name) is part


@pytest.mark.parametrize(
    ("package", "registry"),
    [(estimators_package, estimators), (budgets_package, budgets)],
    ids=["estimators", "budgets"],
)
def test_every_file_holds_one(package: Any, registry: Any) -> None:
    files = {path.stem for path in Path(package.__file__).parent.glob("[!_]*.py")}
    assert {registry.get(name).__module__.rpartition(".")[2] for name in registry.names()} == files


# Budgets


@every_budget
def test_parameters_are_stored_verbatim(budget: str) -> None:
    for level in (0.0, 0.37, 1.0):
        made = make(budget).at(level, 40)
        given = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        again = type(made)(**given)
        assert again == made
        assert all(getattr(again, name) is value for name, value in given.items())


@every_budget
def test_the_primary_option_is_a_field(budget: str) -> None:
    kind = budgets.get(budget)
    assert kind.primary in {field.name for field in dataclasses.fields(kind) if field.repr}
    assert isinstance(kind.reads_shares, bool)


@every_budget
@every_granularity
def test_texts_and_json_read_back(budget: str, granularity: Any, tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    start = budgets.get(budget)()
    if isinstance(start, Profiled):
        start = Profiled(profile=str(tmp_path / "p.json"))
    for level in LEVELS:
        policy = Policy(
            estimator=estimators.get("exact")(), budget=start.at(level, 40), granularity=granularity
        )
        text = str(policy)
        assert parse_policy(text) == policy
        assert str(parse_policy(text)) == text
        record = json.loads(json.dumps(policy.to_json()))
        assert Policy.from_json(record) == policy


@every_budget
def test_selecting_is_deterministic_and_leaves_its_input_alone(budget: str) -> None:
    shares, rows = block()
    before = shares.clone(), {name: getattr(rows, name) for name in vars(rows)}
    geometry = {name: value.clone() for name, value in vars(rows).items() if isinstance(value, Tensor)}
    first = make(budget).select(shares, rows)
    assert torch.equal(first, make(budget).select(shares, rows))
    assert torch.equal(shares, before[0])
    for name, value in geometry.items():
        assert torch.equal(getattr(rows, name), value)
    assert first.dtype == torch.bool
    assert first.shape == shares.shape


@every_budget
@pytest.mark.parametrize("padding", [0.0, 1.0, float("nan")], ids=str)
def test_pages_of_the_row_only_and_the_forced_ones_always(budget: str, padding: float) -> None:
    shares, rows = block(padding=padding)
    width = shares.shape[1]
    for level in LEVELS:
        kept = make(budget).at(level, width).select(shares, rows)
        assert not (kept & ~rows.valid(width)).any()
        assert not (rows.forced(width) & ~kept).any()


@every_budget
def test_what_stands_in_the_padding_does_not_matter(budget: str) -> None:
    for level in (0.2, 0.7):
        chosen = make(budget).at(level, 40)
        sets = [chosen.select(*block(padding=padding)) for padding in (0.0, 1.0, float("nan"))]
        assert torch.equal(sets[0], sets[1])
        assert torch.equal(sets[0], sets[2])


@every_budget
@pytest.mark.parametrize("shares", ["zero", "NaN", "equal", "one"])
def test_odd_shares(budget: str, shares: str) -> None:
    _, rows = block()
    width = 40
    odd = {
        "zero": torch.zeros(len(rows), width),
        "NaN": torch.full((len(rows), width), float("nan")),
        "equal": torch.full((len(rows), width), 1 / width),
        "one": torch.nn.functional.one_hot(rows.n_pages // 2, width).float(),
    }[shares]
    for level in (0.0, 0.5, 1.0):
        kept = make(budget).at(level, width).select(odd, rows)
        assert not (kept & ~rows.valid(width)).any()
        assert not (rows.forced(width) & ~kept).any()
        if level == 1:
            assert torch.equal(kept, rows.valid(width))


@every_budget
@pytest.mark.parametrize("first_page", [0, 3])
def test_a_row_of_one_page(budget: str, first_page: int) -> None:
    one, none = torch.tensor([1]), torch.tensor([0])
    rows = Rows(
        n_pages=one,
        first_page=torch.tensor([first_page]),
        position=torch.tensor([first_page * 16 + 3]),
        layer=none,
        kv_head=none,
        page_size=16,
    )
    for level in LEVELS:
        assert make(budget).at(level, 1).select(torch.ones(1, 1), rows).tolist() == [[True]]


@every_budget
def test_permuting_pages_permutes_the_set(budget: str) -> None:
    shares, rows = block()
    width = shares.shape[1]
    generator = np.random.default_rng(1)
    places = np.tile(np.arange(width), (len(rows), 1))
    free = (rows.valid(width) & ~rows.forced(width)).numpy()
    for row, is_free in zip(places, free, strict=True):
        row[is_free] = generator.permutation(row[is_free])
    order = torch.from_numpy(places)
    for level in LEVELS[1:-1:3]:
        chosen = make(budget).at(level, width)
        kept, moved = chosen.select(shares, rows), chosen.select(shares.gather(1, order), rows)
        if chosen.reads_shares:
            assert torch.equal(moved, kept.gather(1, order))
        else:
            assert torch.equal(moved, kept)


@every_budget
def test_rows_do_not_depend_on_each_other(budget: str) -> None:
    shares, rows = block()
    together = make(budget).select(shares, rows)
    for row in range(len(rows)):
        index = torch.tensor([row])
        tensors = {name: value[index] for name, value in vars(rows).items() if torch.is_tensor(value)}
        alone = dataclasses.replace(rows, **tensors)
        assert torch.equal(make(budget).select(shares[index], alone), together[index])


@every_budget
def test_levels_go_from_little_to_everything(budget: str) -> None:
    shares, rows = block()
    width = shares.shape[1]
    sets = [make(budget).at(level, width).select(shares, rows) for level in LEVELS]
    for smaller, larger in pairwise(sets):
        assert not (smaller & ~larger).any()  # nested, so reads and coverage rise in every row
    assert torch.equal(sets[-1], rows.valid(width))
    reads = [int(kept.sum()) for kept in sets]
    assert reads[0] <= 0.2 * reads[-1]
    assert len(set(reads)) >= 8  # a search finds levels in between


@every_budget
def test_many_budgets_at_once_equal_one_by_one(budget: str) -> None:
    shares, rows = block()
    width = shares.shape[1]
    many = [make(budget).at(level, width) for level in LEVELS[::4]]
    ranking = many[0].rank(shares, rows)
    counts = type(many[0]).counts(ranking, many)
    for column, one in enumerate(many):
        assert torch.equal(counts[:, column], one.count(one.rank(shares, rows)))
        assert torch.equal(counts[:, column], one.select(shares, rows).sum(1))


@every_budget
def test_no_choice_of_as_many_pages_beats_the_exact_ranking(budget: str) -> None:
    exact, rows = block(0)
    noise = torch.from_numpy(np.random.default_rng(2).lognormal(0, 1, exact.shape)).float()
    estimates = exact * noise, block(5)[0]
    for estimate in estimates:
        for level in LEVELS[::4]:
            kept = make(budget).at(level, exact.shape[1]).select(estimate, rows)
            best = take(rank(exact, rows), kept.sum(1))
            assert torch.equal(best.sum(1), kept.sum(1))
            assert (exact.where(kept, 0).sum(1) <= exact.where(best, 0).sum(1) + 1e-6).all()


@every_budget
@pytest.mark.gpu
def test_budgets_keep_the_same_pages_on_a_gpu(budget: str) -> None:
    for seed in range(3):
        for level in LEVELS:
            chosen = make(budget).at(level, 40)
            assert torch.equal(chosen.select(*block(seed, "cuda")).cpu(), chosen.select(*block(seed)))


# Policies on a trace


@every_budget
@every_estimator
@every_granularity
def test_a_policy_on_a_trace(trace: Trace, estimator: str, budget: str, granularity: Any) -> None:
    levels = (0.0, 0.4, 0.8, 1.0)
    policies = [
        Policy(
            estimator=estimators.get(estimator)(),
            budget=make(budget).at(level, trace.max_pages),
            granularity=granularity,
        )
        for level in levels
    ]
    result = evaluate(trace, policies)
    assert result.kept[:, -1].tolist() == result.pages.tolist()
    assert result.coverage[:, -1] == pytest.approx(result.rows)
    assert result.covered[:, -1].tolist() == result.rows.tolist()
    assert (np.diff(result.kept, axis=1) >= 0).all()
    assert (np.diff(result.coverage, axis=1) >= -1e-4).all()
    assert (result.kept_tokens <= result.tokens[:, None]).all()
    assert result.kept[:, 0].sum() < result.pages.sum()


@every_estimator
@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_no_estimator_beats_the_oracle_at_equal_pages(
    trace: Trace, estimator: str, granularity: str, count: int
) -> None:
    best, other = (parse_policy(f"{text}/fixed:{count}") for text in ("exact", estimator))
    other = dataclasses.replace(other, granularity=granularity)
    result = evaluate(trace, [best, other])
    pages = np.concatenate([kept for *_, kept in policy_counts(trace, [best, other])])
    assert (pages[:, 0] == pages[:, 1]).all()
    assert (result.coverage[:, 1] <= result.coverage[:, 0] + 1e-4).all()
    assert (estimator, granularity) == ("exact", "kv_head") or (
        result.coverage[:, 1] < result.coverage[:, 0]
    ).any()


# Estimators


@every_estimator
def test_metadata_is_counted(estimator: str) -> None:
    made = estimators.get(estimator)()
    for head_dim, page_size in ((64, 64), (128, 16), (96, 1)):
        values = made.metadata_values(head_dim, page_size)
        assert isinstance(values, int)
        assert values > 0
    assert made.metadata_values(128, 64) > made.metadata_values(64, 64)


@every_estimator
@pytest.mark.parametrize("pages", [1, 2, 6])
def test_log_masses(estimator: str, pages: int) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of(pages=pages)
    before = query.clone(), keys.clone()
    summary = made.summarize(keys)
    mass = made.log_mass(query, summary)
    assert mass.shape == (HEADS, 3, pages)
    assert mass.isfinite().all()
    assert summary.n_pages == pages
    assert torch.equal(mass, made.log_mass(query, made.summarize(keys)))
    assert torch.equal(query, before[0])
    assert torch.equal(keys, before[1])


@every_estimator
def test_permuting_the_pages_permutes_the_masses(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    mass = made.log_mass(query, made.summarize(keys))
    moved = made.log_mass(query, made.summarize(keys[:, order]))
    torch.testing.assert_close(moved, mass[..., order])


@every_estimator
def test_permuting_heads_permutes_the_masses(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    mass = made.log_mass(query, made.summarize(keys))
    torch.testing.assert_close(made.log_mass(query.flip(0), made.summarize(keys.flip(0))), mass.flip(0))
    torch.testing.assert_close(made.log_mass(query.flip(1), made.summarize(keys)), mass.flip(1))


@every_estimator
def test_the_order_of_keys_in_a_page_does_not_matter(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    torch.testing.assert_close(
        made.log_mass(query, made.summarize(keys.flip(2))), made.log_mass(query, made.summarize(keys))
    )


@every_estimator
def test_summaries_grow_and_are_cut(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    whole = made.log_mass(query, made.summarize(keys))
    grown: Summary = made.summarize(keys[:, :2]).append(made.summarize(keys[:, 2:5]))
    grown = grown.append(made.summarize(keys[:, 5:]))
    assert grown.n_pages == 6
    torch.testing.assert_close(made.log_mass(query, grown), whole)
    torch.testing.assert_close(made.log_mass(query, grown.pages(1, 4)), whole[..., 1:4])


@every_estimator
def test_a_page_that_the_query_points_at_has_more_mass(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    keys[:, 3] += 5 * query.mean(1, keepdim=True) / query.mean(1, keepdim=True).square().sum(-1, keepdim=True)
    shares = made.log_mass(query, made.summarize(keys)).softmax(-1).mean(1)
    assert shares.argmax(-1).tolist() == [3] * HEADS


@every_estimator
@pytest.mark.gpu
def test_estimators_agree_on_a_gpu(estimator: str) -> None:
    made = estimators.get(estimator)()
    query, keys = pages_of()
    there = made.log_mass(query.cuda(), made.summarize(keys.cuda()))
    torch.testing.assert_close(there.cpu(), made.log_mass(query, made.summarize(keys)), rtol=1e-4, atol=1e-4)


# New ones


@pytest.fixture
def newcomers() -> Iterator[None]:
    """Forget what a test registered."""
    before = [(registry, dict(registry._classes)) for registry in (estimators, budgets)]
    yield
    for registry, classes in before:
        registry._classes.clear()
        registry._classes.update(classes)


def register_half() -> type[Budget]:
    @budgets_package.register("half")
    @dataclass(frozen=True, kw_only=True)
    class Half(Budget):
        """Keep half of the pages."""

        title = "half"
        source = "this test"
        primary = "part"
        part: float = 0.5

        def count(self, ranking: Ranking) -> Tensor:
            wanted = (self.part * ranking.rows.n_pages).ceil().long()
            return wanted.maximum(ranking.n_forced)

        def at(self, level: float, max_pages: int) -> Self:
            return type(self)(part=max(level, 1e-6))

    return Half


@pytest.mark.usefixtures("newcomers")
def test_a_new_budget_appears_everywhere(trace: Trace) -> None:
    half = register_half()
    assert "half" in budgets.names()
    policy = parse_policy("mvar/half:0.25@layer")
    assert policy.budget == half(part=0.25)
    assert str(policy) == "mvar/half:0.25@layer"
    for records in (same_guarantee(trace), same_reads(trace)):
        names = {record["policy"].partition(":")[0] for record in records}
        assert {f"{estimator}/half" for estimator in trace.estimators} <= names


@pytest.mark.usefixtures("newcomers")
def test_a_new_estimator_appears_everywhere(tmp_path: Path) -> None:
    @estimators_package.register("first-key")
    @dataclass(frozen=True, kw_only=True)
    class FirstKey(Estimator):
        """Take the first key for all."""

        title = "first key"
        source = "this test"

        def summarize(self, keys: Tensor) -> Summary:
            return Summary(keys.shape[-2], {"key": keys[..., 0, :]})

        def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
            return query @ summary["key"].transpose(-1, -2)

        def metadata_values(self, head_dim: int, page_size: int) -> int:
            return head_dim

    assert "first-key" in estimators.names()
    assert parse_policy("first-key/fixed:3").estimator == FirstKey()
    shape = synthetic.Shape(requests=2, layers=1, kv_heads=1, estimators=("exact", "first-key"))
    written = Trace(synthetic.write(tmp_path / "t", shape))
    records = same_guarantee(written) + same_reads(written, anchor="first-key/coverage:0.9")
    found = [record for record in records if record["policy"].startswith("first-key/")]
    assert {record["table"] for record in found} == {"same_guarantee", "same_reads"}
    assert {record["policy"].partition("/")[2].partition(":")[0] for record in found} == {
        name for name in budgets.names() if budgets.get(name).reads_shares
    }
    assert {record["reads_metadata"] for record in found} == {1 / (2 * 16)}  # one vector of 2 x 16


@pytest.mark.usefixtures("newcomers")
def test_a_budget_with_a_ranking_of_its_own(trace: Trace) -> None:
    """It sees the estimate and not the exact shares, and is not given the ranking of another budget."""

    @budgets_package.register("least-first")
    @dataclass(frozen=True, kw_only=True)
    class LeastFirst(Budget):
        """Keep the three pages with the smallest shares."""

        title = "least first"
        source = "this test"
        primary = "pages"
        pages: int = 3

        def rank(self, shares: Tensor, rows: Rows) -> Ranking:
            return rank(1 - shares, rows)

        def count(self, ranking: Ranking) -> Tensor:
            return torch.full_like(ranking.n_forced, self.pages).minimum(ranking.rows.n_pages)

    for granularity in GRANULARITIES:
        texts = [
            f"{name}/{budget}@{granularity}"
            for name in ("mean", "exact")
            for budget in ("fixed:3", "least-first")
        ]
        policies = [parse_policy(text) for text in texts]
        together = evaluate(trace, policies).coverage
        alone = np.concatenate([evaluate(trace, [policy]).coverage for policy in policies], axis=1)
        assert together == pytest.approx(alone, rel=1e-6)
        assert (alone[:, 1] < alone[:, 0]).all()
        assert (alone[:, 3] < alone[:, 2]).all()
        assert (alone[:, 1] > alone[:, 3]).all()  # the exact shares know best what is least


def test_a_budget_that_counts_nothing_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="Empty gives neither count nor counts"):
        type("Empty", (Budget,), {})
