"""Analyses of page lists, each against sets of pages in plain Python."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import plain
import polars as pl
import pytest
import synthetic
from scipy import stats

from coverage_lab.analyses import analyses
from coverage_lab.analyses.lists import Lists, over_lists
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import parse_policy
from coverage_lab.trace import Trace

# Rows of layer 1 begin at later pages as they go on: its window is shorter than the context.
SHAPE = synthetic.Shape(
    requests=4, layers=3, kv_heads=2, steps=(20, 3, 9, 1), pages=(6, 25), windows={1: 70}, seed=4
)
POLICY = "mvar/coverage:0.9"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("lists") / "t", SHAPE))


def sets(trace: Trace, policy: str = POLICY) -> dict[tuple[int, int, int, int], set[int]]:
    """Return what a policy keeps of every row, as absolute page numbers, by request, layer, head and step."""
    parsed, siblings = parse_policy(policy), plain.siblings_of(trace)
    return {
        (row.request, row.layer, row.kv_head, row.step): {
            page + row.first_page for page in plain.keep(parsed, row, siblings[row.place], SHAPE.group)
        }
        for row in plain.rows_of(trace)
    }


def shares(row: Any, column: str = "share") -> dict[int, float]:
    """Return the shares of a row by absolute page, scaled to sum to one."""
    total = math.fsum(row.shares[column])
    return {page + row.first_page: share / total for page, share in enumerate(row.shares[column])}


def by_row(trace: Trace) -> dict[tuple[int, int, int, int], Any]:
    return {(row.request, row.layer, row.kv_head, row.step): row for row in plain.rows_of(trace)}


def line(table: pl.DataFrame, **wanted: Any) -> dict[str, Any]:
    """Return the one line of a table with these values."""
    rows = table.filter(*(pl.col(name).eq_missing(value) for name, value in wanted.items()))
    assert rows.height == 1, wanted
    return rows.to_dicts()[0]


def compute(name: str, trace: Trace, **options: Any) -> pl.DataFrame:
    return analyses.get(name)(**options).compute(trace)  # type: ignore[call-arg]


def test_lists_are_those_of_the_policy(trace: Trace) -> None:
    wanted, rows, seen = sets(trace), by_row(trace), 0
    for lists in over_lists(trace, POLICY, lambda lists: lists):
        for layer, head, step in np.ndindex(lists.n_pages.shape):
            key = (lists.request, int(lists.layers[layer]), head, step)
            columns = lists.kept[layer, head, step].nonzero()[0] + lists.first_page
            assert set(columns.tolist()) == wanted[key]
            assert lists.start[layer, head, step] + lists.first_page == rows[key].first_page
            assert lists.n_pages[layer, head, step] == rows[key].n_pages
            exact = lists.exact[layer, head, step]
            found = {page + lists.first_page: exact[page] for page in exact.nonzero()[0]}
            assert found == pytest.approx({p: s for p, s in shares(rows[key]).items() if s}, abs=1e-6)
            seen += 1
    assert seen == len(rows)


@pytest.mark.parametrize("policy", ["exact/fixed:5,dense_layers=1", "mvar/coverage:0.9@layer"])
def test_lists_of_other_policies(trace: Trace, policy: str) -> None:
    wanted = sets(trace, policy)

    def count(lists: Lists) -> list[tuple[tuple[int, int, int, int], int]]:
        return [
            ((lists.request, int(lists.layers[place[0]]), *place[1:]), int(lists.counts[place]))
            for place in np.ndindex(lists.n_pages.shape)
        ]

    found = dict(pair for part in over_lists(trace, policy, count) for pair in part)
    assert found == {key: len(pages) for key, pages in wanted.items()}


def test_lists_for_query_heads_are_their_union(tmp_path: Path) -> None:
    shape = synthetic.Shape(requests=2, record="query-heads", seed=1)
    trace = Trace(synthetic.write(tmp_path / "t", shape))
    policy = "exact/coverage:0.8@query_head"
    wanted = sets(trace, policy)
    for lists in over_lists(trace, policy, lambda lists: lists):
        for place in np.ndindex(lists.n_pages.shape):
            columns = set(lists.kept[place].nonzero()[0].tolist())
            assert columns == wanted[lists.request, int(lists.layers[place[0]]), place[1], place[2]]


# Sinks


def test_sinks(trace: Trace) -> None:
    table = compute("sinks", trace, local=2)
    wanted: dict[Any, list[dict[str, float]]] = {}
    for row in plain.rows_of(trace):
        mass = shares(row)
        last = row.first_page + row.n_pages
        sink = mass.get(0, 0.0)
        local = math.fsum(share for page, share in mass.items() if page and page >= last - 2)
        parts = {"sink": sink, "local": local, "elsewhere": 1 - sink - local}
        for key in ((None, None), (row.layer, row.kv_head)):
            wanted.setdefault(key, []).append(parts)
    assert table.height == 3 * len(wanted)
    for (layer, head), parts in wanted.items():
        for part in ("sink", "local", "elsewhere"):
            found = line(table, layer=layer, kv_head=head, part=part)
            assert found["share"] == pytest.approx(np.mean([each[part] for each in parts]), abs=1e-6)


def test_a_window_of_no_page_is_refused() -> None:
    with pytest.raises(CoverageLabError, match="at least the current page"):
        analyses.get("sinks")(local=0)  # type: ignore[call-arg]


# Where


def test_where(trace: Trace) -> None:
    table, kept, rows = compute("where", trace, policy=POLICY), sets(trace), by_row(trace)
    by_head: dict[tuple[int, int], list[float]] = {}
    for key, pages in kept.items():
        by_head.setdefault(key[1:3], []).append(len(pages) / rows[key].n_pages)
    mean = {head: float(np.mean(values)) for head, values in by_head.items()}
    layers = [[mean[layer, head] for head in range(2)] for layer in range(3)]
    ratios = [max(heads) / min(heads) for heads in layers]
    for what, wanted in (
        ("least reading KV head", min(mean.values())),
        ("most reading KV head", max(mean.values())),
        ("least reading layer", min(map(np.mean, layers))),
        ("most reading layer", max(map(np.mean, layers))),
        ("median layer's most over least reading KV head", np.median(ratios)),
        ("largest of these ratios", max(ratios)),
    ):
        found = line(table, what=what, layer=None)
        assert found["value"] == pytest.approx(wanted)
        assert found["ci_low"] <= found["value"] + 1e-9 or "KV head" in what
    for layer, heads in enumerate(layers):
        assert line(table, what="mean of the layer", layer=layer)["value"] == pytest.approx(np.mean(heads))
        assert line(table, what="its least reading KV head", layer=layer)["value"] == pytest.approx(
            min(heads)
        )


def test_where_quotes_the_paper_for_its_policy_alone(trace: Trace) -> None:
    assert compute("where", trace, policy=POLICY)["paper"].is_null().all()
    assert not compute("where", trace)["paper"].is_null().all()


# Slots


@pytest.mark.parametrize("margin", [1.0, 1.5])
def test_slots(trace: Trace, margin: float) -> None:
    found = line(compute("slots", trace, policy=POLICY), margin=margin)
    counts = {key: len(pages) for key, pages in sets(trace).items()}
    pairs = [(counts[(*key[:3], key[3] - 1)], count) for key, count in counts.items() if key[3] > 0]
    slots = [math.ceil(margin * before) for before, _ in pairs]
    over = [after > room for (_, after), room in zip(pairs, slots, strict=True)]
    assert found["overflow"] == pytest.approx(np.mean(over))
    assert found["reserve"] == pytest.approx(sum(slots) / sum(after for _, after in pairs))


def test_the_margin_that_is_enough_is_found(trace: Trace) -> None:
    table = compute("slots", trace, policy=POLICY, overflow=0.1)
    found = table.filter(pl.col("note").str.contains("at most 10.0%"))
    assert found.height == 1
    assert found["overflow"][0] <= 0.1
    assert (table.filter(pl.col("margin") < found["margin"][0])["overflow"] > 0.1).all()


def test_slots_need_two_steps(tmp_path: Path) -> None:
    one = synthetic.write(tmp_path / "t", synthetic.Shape(requests=2, steps=1))
    with pytest.raises(CoverageLabError, match="no request has two decode steps; collect more with --steps"):
        compute("slots", Trace(one))


# Coarsening


def test_coarsening_of_the_only_batch(tmp_path: Path) -> None:
    # One request of one step: every batch is the same.
    shape = synthetic.Shape(requests=1, layers=4, kv_heads=3, steps=1, pages=(40, 60), seed=2)
    trace = Trace(synthetic.write(tmp_path / "t", shape))
    table = compute("coarsening", trace, policy=POLICY, batch=3, batches=2)
    kept, pages = sets(trace), plain.rows_of(trace)[0].n_pages
    layers = [[kept[0, layer, head, 0] for head in range(3)] for layer in range(4)]
    shared = sets(trace, f"{POLICY}@layer")
    wanted = [
        [len(head) for heads in layers for head in heads],
        [max(map(len, heads)) for heads in layers for _ in heads],
        [min(pages, 2 ** math.ceil(math.log2(len(head)))) for heads in layers for head in heads],
        [max(map(len, heads)) for heads in layers for _ in heads],
        [len(set().union(*heads)) for heads in layers for _ in heads],
        [len(shared[0, layer, 0, 0]) for layer in range(4) for _ in range(3)],
    ]
    assert table["reads"].to_list() == pytest.approx([np.mean(each) / pages for each in wanted])
    covered = [math.fsum(shares(row)[page] for page in kept[key]) for key, row in by_row(trace).items()]
    assert table["coverage_mean"][0] == pytest.approx(np.mean(covered), abs=1e-6)


def test_coarsening_over_many_batches_is_the_mean_over_requests(trace: Trace) -> None:
    table = compute("coarsening", trace, policy=POLICY, batch=64, batches=300)
    kept, rows = sets(trace), by_row(trace)
    # Requests are drawn alike, and a step of each.
    sums = {name: np.zeros(4) for name in ("kept", "union", "pages")}
    for request in range(4):
        own = [key for key in kept if key[0] == request]
        steps = len({key[3] for key in own})
        sums["kept"][request] = sum(len(kept[key]) for key in own) / steps
        sums["pages"][request] = sum(rows[key].n_pages for key in own) / steps
        sums["union"][request] = (
            sum(len(kept[key] | kept[(*key[:2], 1, key[3])]) for key in own if key[2] == 0) * 2 / steps
        )
    for place, name in ((0, "kept"), (4, "union")):
        assert table["reads"][place] == pytest.approx(sums[name].sum() / sums["pages"].sum(), rel=0.02)
    assert (table["ci_low"] < table["reads"]).all()
    assert (table["reads"] < table["ci_high"]).all()
    # Whoever reads at least what own lists read.
    assert (table["reads"][:5] >= table["reads"][0] - 1e-12).all()


def test_only_lists_of_kv_heads_are_coarsened(trace: Trace) -> None:
    with pytest.raises(CoverageLabError, match="lists of KV heads are coarsened"):
        compute("coarsening", trace, policy="exact/coverage:0.9@layer")
    with pytest.raises(CoverageLabError, match="--batch 0 is not 1 or more"):
        analyses.get("coarsening")(batch=0)  # type: ignore[call-arg]


# Stability


def shared_part(pairs: Iterable[tuple[set[int], set[int]]]) -> float:
    pairs = list(pairs)
    return sum(len(mine & other) for mine, other in pairs) / sum(len(mine) for mine, _ in pairs)


@pytest.mark.parametrize(
    ("what", "distance", "neighbour"),
    [
        ("steps apart", 1, lambda r, layer, h, s: [(r, layer, h, s - 1)]),
        ("steps apart", 4, lambda r, layer, h, s: [(r, layer, h, s - 4)]),
        ("other KV heads of the layer", 1, lambda r, layer, h, s: [(r, layer, 1 - h, s)]),
        ("the next layer, same KV head", 1, lambda r, layer, h, s: [(r, layer - 1, h, s)]),
    ],
)
@pytest.mark.parametrize("elements", [1, 1 << 18], ids=["a layer a block", "all layers"])
def test_overlaps(
    trace: Trace,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    distance: int,
    neighbour: Callable[..., list[tuple[int, ...]]],
    elements: int,
) -> None:
    whole = Trace.spans
    monkeypatch.setattr(Trace, "spans", lambda self, columns: whole(self, columns, elements))
    kept: dict[Any, set[int]] = sets(trace)  # type: ignore[assignment]
    pairs = [
        (pages, kept[other]) for key, pages in kept.items() for other in neighbour(*key) if other in kept
    ]
    found = line(compute("stability", trace, policy=POLICY), what=what, distance=distance)
    assert found["overlap"] == pytest.approx(shared_part(pairs))


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("what", ["a list for so many steps", "one list for so many queries"])
def test_lists_that_are_shared_by_steps(trace: Trace, what: str, group: int) -> None:
    kept, rows = sets(trace), by_row(trace)
    covered, read = [], []
    for key, row in rows.items():
        steps = SHAPE.steps_of(key[0])
        if group > steps:
            continue
        first = key[3] // group * group
        visible = set(range(row.first_page, row.first_page + row.n_pages))
        if what.startswith("a list"):
            pages = kept[(*key[:3], first)] | {max(visible)}
        else:
            members = range(first, min(first + group, steps))
            pages = set().union(*(kept[(*key[:3], step)] for step in members)) & (
                visible | set(range(row.first_page))
            )
        covered.append(math.fsum(shares(row).get(page, 0.0) for page in pages))
        read.append(len(pages))
    found = line(compute("stability", trace, policy=POLICY, target=0.85), what=what, distance=group)
    assert found["coverage"] == pytest.approx(np.mean(covered), abs=1e-6)
    assert found["rows_below"] == pytest.approx(
        np.mean(np.array(covered) < 0.85 - 1e-6), abs=2 / len(covered)
    )
    pages_of = sum(row.n_pages for key, row in rows.items() if group <= SHAPE.steps_of(key[0]))
    assert found["reads"] == pytest.approx(sum(read) / pages_of)


# Page size


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_page_size(trace: Trace, factor: int) -> None:
    found = line(compute("page-size", trace, gamma=0.9), page_size=16 * factor)
    counts, fractions = [], []
    for row in plain.rows_of(trace):
        larger: dict[int, float] = {}
        for page, share in shares(row).items():
            larger[page // factor] = larger.get(page // factor, 0.0) + share
        chosen, have = set(), 0.0
        for page in sorted(larger, key=lambda page: (-larger[page], page)):
            if have >= 0.9 - 1e-6:
                break
            chosen.add(page)
            have += larger[page]
        counts.append(len(chosen))
        fractions.append(sum(page // factor in chosen for page in shares(row)) / row.n_pages)
    assert found["pages"] == pytest.approx(np.mean(counts), rel=1e-3)
    assert found["fraction"] == pytest.approx(np.mean(fractions), rel=1e-3)


def test_page_size_needs_smaller_pages(trace: Trace) -> None:
    with pytest.raises(CoverageLabError, match="pages of 16 tokens, and --largest is 16; collect with"):
        compute("page-size", trace, largest=16)
    with pytest.raises(CoverageLabError, match="--gamma 1 is not between 0 and 1"):
        analyses.get("page-size")(gamma=1)  # type: ignore[call-arg]


# Estimator error


def test_estimator_error(trace: Trace) -> None:
    table = compute("estimator-error", trace, gamma=0.9)
    figures: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in plain.rows_of(trace):
        exact, estimate = shares(row), shares(row, "share_mvar")
        last = row.first_page + row.n_pages - 1
        inner = [page for page in exact if page not in (0, last)]
        own = figures.setdefault((row.layer, row.kv_head), {"error": [], "rank": [], "coverage": []})
        if inner:
            # Shares of float16 can be nothing where the others are all.
            parts = [
                min(max(math.fsum(of[page] for page in inner), 1e-6), 1 - 1e-6) for of in (estimate, exact)
            ]
            odds = [math.log(part / (1 - part)) for part in parts]
            own["error"].append(odds[0] - odds[1])
        if len(inner) > 2:
            own["rank"].append(
                stats.spearmanr([exact[page] for page in inner], [estimate[page] for page in inner])[0]
            )
        falling = sorted(exact.values(), reverse=True)
        count = next(n for n in range(1, len(falling) + 1) if math.fsum(falling[:n]) >= 0.9 - 1e-6)
        order = sorted(estimate, key=lambda page: (-estimate[page], page))
        own["coverage"].append(math.fsum(exact[page] for page in order[:count]))
    assert table.height == len(figures)
    for (layer, head), own in figures.items():
        found = line(table, layer=layer, kv_head=head)
        assert found["log_error"] == pytest.approx(np.mean(own["error"]), abs=1e-5)
        assert found["rank_correlation"] == pytest.approx(np.nanmean(own["rank"]), abs=1e-5)
        assert found["coverage"] == pytest.approx(np.mean(own["coverage"]), abs=1e-5)
        assert found["fails"] == (found["coverage"] < 0.8)
        assert 0 <= found["at_limit"] <= 1
    assert table["coverage"].is_sorted()


def test_estimates_that_were_not_recorded_are_named(trace: Trace) -> None:
    with pytest.raises(CoverageLabError, match="collect it with --estimators exact,mvar,quest"):
        compute("estimator-error", trace, estimator="quest")
    with pytest.raises(CoverageLabError, match="estimator exact has no error"):
        compute("estimator-error", trace, estimator="exact")


# Budgets


def test_budgets_are_those_of_the_comparison(tmp_path: Path) -> None:
    from coverage_lab.policies.compare import same_guarantee

    trace = Trace(synthetic.write(tmp_path / "t", synthetic.Shape(requests=4, steps=4, seed=3)))
    table = compute("budgets", trace)
    wanted = [line for line in same_guarantee(trace) if line["policy"].startswith("exact/")]
    assert table["policy"].to_list() == [line["policy"] for line in wanted]
    assert table["tokens_over_oracle"].to_list() == [line["tokens_over_oracle"] for line in wanted]
    papers = dict(zip(table["policy"], table["paper"], strict=True))
    assert [ratio for policy, ratio in papers.items() if "fixed" in policy] == ["2.38"]
    assert compute("budgets", trace, rows=0.5)["paper"].is_null().all()
