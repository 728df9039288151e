"""How the needed budget varies: against plain NumPy, and by hand."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import plain
import polars as pl
import pytest
import synthetic

from coverage_lab.analyses import variation
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

mpl.use("Agg")

QUANTITIES = [
    "CV across layers",
    "CV across KV heads",
    "CV across steps",
    "CV of totals across KV heads",
    "CV of totals across steps",
    "CV of totals over the context, across requests",
    "mean fraction of the context",
    "mean fraction, first layer",
]
SHAPE = synthetic.Shape(
    requests=5, layers=4, kv_heads=3, steps=(6, 3, 9), pages=(5, 25), record="counts", seed=4
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("variation") / "t", SHAPE))


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def values(frame: pl.DataFrame) -> dict[str, float]:
    return dict(frame.select("quantity", "value").iter_rows())


def grids(trace: Trace, gamma: str = "0.95") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for every request its counts and its pages, `[layers, KV heads, steps]`."""
    found = []
    for request in range(len(trace.shards)):
        rows = [row for row in plain.rows_of(trace) if row.request == request]
        shape = [1 + max(getattr(row, name) for row in rows) for name in ("layer", "kv_head", "step")]
        counts, pages = np.zeros(shape), np.zeros(shape)
        for row in rows:
            counts[row.layer, row.kv_head, row.step] = row.recorded[f"oracle_pages_{gamma}"]
            pages[row.layer, row.kv_head, row.step] = row.n_pages
        found.append((counts, pages))
    return found


def cv(counts: np.ndarray, axis: int) -> np.ndarray:
    return (counts.std(axis) / counts.mean(axis)).ravel()


def by_numpy(trace: Trace, gamma: str = "0.95") -> dict[str, float]:
    data = grids(trace, gamma)
    totals = [counts.sum(0) for counts, _ in data]
    fractions = np.array([(counts.sum(0) / pages.sum(0)).mean() for counts, pages in data])
    return {
        "CV across layers": np.concatenate([cv(counts, 0) for counts, _ in data]).mean(),
        "CV across KV heads": np.concatenate([cv(counts, 1) for counts, _ in data]).mean(),
        "CV across steps": np.concatenate([cv(counts, 2) for counts, _ in data]).mean(),
        "CV of totals across KV heads": np.concatenate([cv(total, 0) for total in totals]).mean(),
        "CV of totals across steps": np.concatenate([cv(total, 1) for total in totals]).mean(),
        "CV of totals over the context, across requests": fractions.std() / fractions.mean(),
        "mean fraction of the context": np.concatenate([(c / p).ravel() for c, p in data]).mean(),
        "mean fraction, first layer": np.concatenate([(c[0] / p[0]).ravel() for c, p in data]).mean(),
    }


@pytest.mark.parametrize("gamma", ["0.95", "0.9"])
def test_values_are_those_of_numpy(trace: Trace, gamma: str) -> None:
    found = variation.compute(trace, float(gamma))
    assert values(found) == pytest.approx(by_numpy(trace, gamma), rel=1e-9)
    assert found["quantity"].to_list() == QUANTITIES


def test_groups_and_requests_are_counted(trace: Trace) -> None:
    # Steps of the five requests: 6, 3, 9, 6, 3, 27 in all.
    found = variation.compute(trace)
    assert set(found["requests"]) == {5}
    assert dict(found.select("quantity", "groups").iter_rows()) == {
        "CV across layers": 27 * 3,
        "CV across KV heads": 27 * 4,
        "CV across steps": 5 * 4 * 3,
        "CV of totals across KV heads": 27,
        "CV of totals across steps": 5 * 3,
        "CV of totals over the context, across requests": 1,
        "mean fraction of the context": 27 * 12,
        "mean fraction, first layer": 27 * 3,
    }


def test_the_papers_values_stand_beside(trace: Trace) -> None:
    paper = dict(variation.compute(trace).select("quantity", "paper").iter_rows())
    assert [paper[name] for name in QUANTITIES] == [
        "0.61",
        "0.74",
        "0.53",
        "0.13-0.18",
        "0.13-0.18",
        "0.13-0.18",
        "0.216",
        "0.68",
    ]


def shares_with_counts(counts: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Return rows of 10 pages whose C*(0.95) has these counts: that many equal pages and nothing else."""
    return {
        "share": [
            [[[1 / count] * count + [0.0] * (10 - count) for count in head] for head in layer]
            for layer in counts
        ]
    }


def write_counts(path: Path, requests: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Trace:
    # Steps stay within one page: n_pages is 10 at all of them.
    made = [shares_with_counts(counts) for counts in requests]
    return Trace(synthetic.write_shares(path, made, prompt_tokens=9 * 4, gammas=(0.95,)))


def test_by_hand(tmp_path: Path) -> None:
    """Two requests, two layers of two KV heads, two steps, 10 pages each."""
    made = [
        [[[1, 3], [3, 3]], [[3, 9], [9, 1]]],
        [[[2, 2], [2, 2]], [[2, 2], [6, 2]]],
    ]
    found = values(variation.compute(write_counts(tmp_path / "t", made)))
    # The CV of a pair is |a - b| / (a + b).
    # Layers (a pair a head and step): 1-3 3-9 3-9 3-1, 2-2 2-2 2-6 2-2 -> four of 0.5, 0 0 0.5 0.
    assert found["CV across layers"] == pytest.approx((4 * 0.5 + 0.5) / 8)
    # Heads (a layer and step): 1-3 3-3 3-9 9-1, then 2-2 2-2 2-6 2-2.
    assert found["CV across KV heads"] == pytest.approx((0.5 + 0 + 0.5 + 0.8 + 0 + 0 + 0.5 + 0) / 8)
    # Steps (a layer and head): 1-3 3-3 3-9 9-1, then 2-2 2-2 2-2 6-2.
    assert found["CV across steps"] == pytest.approx((0.5 + 0 + 0.5 + 0.8 + 0 + 0 + 0 + 0.5) / 8)
    # Totals over layers, a head a row: 4 12 / 12 4, then 4 4 / 8 4.
    assert found["CV of totals across KV heads"] == pytest.approx((0.5 + 0.5 + 1 / 3 + 0) / 4)
    assert found["CV of totals across steps"] == pytest.approx((0.5 + 0.5 + 0 + 1 / 3) / 4)
    # Totals over 20 pages, the mean of each request: 32 / 80 = 0.4 and 20 / 80 = 0.25.
    assert found["CV of totals over the context, across requests"] == pytest.approx(0.15 / 0.65)
    assert found["mean fraction of the context"] == pytest.approx((32 + 20) / 160)
    assert found["mean fraction, first layer"] == pytest.approx((10 + 8) / 80)
    needs = variation.need_map(Trace(tmp_path / "t"))
    assert needs.rows() == [
        (0, 0, pytest.approx(0.2)),
        (0, 1, pytest.approx(0.25)),
        (1, 0, pytest.approx(0.4)),
        (1, 1, pytest.approx(0.45)),
    ]


def test_need_map_is_the_mean_fraction_of_every_head(trace: Trace) -> None:
    needs = variation.need_map(trace)
    assert needs.columns == ["layer", "kv_head", "fraction"]
    fractions = [counts / pages for counts, pages in grids(trace)]
    mean = np.concatenate(fractions, axis=2).mean(2)  # over all steps of all requests
    expected = [
        (layer, head, pytest.approx(mean[layer, head]))
        for layer in range(SHAPE.layers)
        for head in range(SHAPE.kv_heads)
    ]
    assert needs.rows() == expected


@pytest.mark.parametrize(
    ("change", "without"),
    [
        ({"kv_heads": 1}, {"CV across KV heads", "CV of totals across KV heads"}),
        ({"layers": 1}, {"CV across layers"}),
        ({"steps": 1}, {"CV across steps", "CV of totals across steps"}),
        ({"requests": 1}, {"CV of totals over the context, across requests"}),
        (
            {"kv_heads": 1, "layers": 1, "steps": 1, "requests": 1},
            {name for name in QUANTITIES if name.startswith("CV")},
        ),
    ],
    ids=["one head", "one layer", "one step", "one request", "one row"],
)
def test_what_does_not_vary_has_no_cv(tmp_path: Path, change: dict[str, int], without: set[str]) -> None:
    found = variation.compute(Trace(synthetic.write(tmp_path / "t", replace(SHAPE, **change))))
    assert found["quantity"].to_list() == QUANTITIES
    assert {name for name, value in values(found).items() if math.isnan(value)} == without
    for line in found.iter_rows(named=True):
        if change.get("requests") == 1 or line["quantity"] in without:
            assert math.isnan(line["ci_low"])
            assert math.isnan(line["ci_high"])
        else:
            assert line["ci_low"] <= line["value"] <= line["ci_high"]


def test_intervals_are_by_requests(trace: Trace) -> None:
    """A plain bootstrap: draw requests, take the mean over all groups of those drawn."""
    data = grids(trace)
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, 5, (4000, 5))
    per_request = {
        "CV across layers": [cv(counts, 0) for counts, _ in data],
        "CV across steps": [cv(counts, 2) for counts, _ in data],
        "mean fraction of the context": [(counts / pages).ravel() for counts, pages in data],
    }
    found = variation.compute(trace)
    for name, groups in per_request.items():
        means = [np.concatenate([groups[r] for r in draw]).mean() for draw in drawn]
        low, high = np.quantile(means, [0.025, 0.975])
        line = found.row(by_predicate=pl.col("quantity") == name, named=True)
        assert (line["ci_low"], line["ci_high"]) == pytest.approx((low, high), abs=0.03 * (high - low))
    fractions = np.array([(c.sum(0) / p.sum(0)).mean() for c, p in data])
    low, high = np.quantile(fractions[drawn].std(1) / fractions[drawn].mean(1), [0.025, 0.975])
    line = found.row(
        by_predicate=pl.col("quantity") == "CV of totals over the context, across requests", named=True
    )
    assert (line["ci_low"], line["ci_high"]) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_the_seed_decides_the_intervals_and_nothing_else(trace: Trace) -> None:
    columns = ("value", "ci_low", "ci_high")
    one, again, other = (
        [variation.compute(trace, seed=seed)[column].to_numpy() for column in columns] for seed in (0, 0, 1)
    )
    # Sums over threads differ in the last digit.
    assert np.array(one) == pytest.approx(np.array(again), rel=1e-12)
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    assert (abs(one[1] - other[1]) > 1e-6).any()


def test_a_gamma_that_was_not_recorded_names_the_option(trace: Trace) -> None:
    for call in (variation.compute, variation.need_map):
        with pytest.raises(CoverageLabError, match=r"--gammas 0\.97"):
            call(trace, 0.97)


def test_the_map_is_drawn_as_it_is(trace: Trace) -> None:
    import matplotlib.pyplot as plt

    needs = variation.need_map(trace)
    _, ax = plt.subplots()
    assert variation.plot(needs, ax) is ax
    drawn = ax.collections[0].get_array().reshape(SHAPE.kv_heads, SHAPE.layers)
    expected = needs["fraction"].to_numpy().reshape(SHAPE.layers, SHAPE.kv_heads).T
    assert np.asarray(drawn) == pytest.approx(100 * expected)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "KV head")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2"]


def test_plot_makes_axes_of_its_own(trace: Trace) -> None:
    ax = variation.plot(variation.need_map(trace))
    assert len(ax.figure.axes) == 2  # the map and its colour bar


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 3), (40, 8)], ids=str)
def test_figure_of_any_size(layers: int, heads: int) -> None:
    needs = pl.DataFrame(
        [
            {"layer": layer, "kv_head": head, "fraction": (layer + head) / (layers + heads)}
            for layer in range(layers)
            for head in range(heads)
        ]
    )
    figure = variation.figure(needs)
    figure.canvas.draw()
    ax = figure.axes[0]
    assert ax.collections[0].get_array().size == layers * heads
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert [label for label in labels if label] == [str(n) for n in range(0, layers, 2 if layers > 16 else 1)]
