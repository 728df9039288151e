"""Comparisons as frames and as figures."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import polars as pl
import pytest
import synthetic
from matplotlib.axes import Axes

from coverage_lab.analyses import comparison
from coverage_lab.policies.compare import given
from coverage_lab.trace import Trace

mpl.use("Agg")

SHAPE = synthetic.Shape(requests=2, layers=2, kv_heads=1, steps=3, pages=(4, 12))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("comparison") / "t", SHAPE))


@pytest.fixture(scope="module")
def both(trace: Trace) -> pl.DataFrame:
    return comparison.compute(trace, target_rows=0.8)


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def points(ax: Axes, estimator: str) -> list[tuple[float, float]]:
    """Return height and value of the dots of an estimator."""
    (line,) = (line for line in ax.lines if line.get_label() == estimator)
    return list(zip(line.get_ydata(), line.get_xdata(), strict=True))


def test_policies_are_split_into_estimator_and_budget() -> None:
    texts = {
        "mvar/coverage:0.98": ("mvar", "coverage"),
        "exact/fixed:tokens=4096@layer": ("exact", "fixed"),
        "exact/profiled:per-kv_head,scale=1.2": ("exact", "profiled:per-kv_head"),
        "mean/profiled:per-layer": ("mean", "profiled:per-layer"),
    }
    frame = comparison.to_frame([{"policy": text, "reads_metadata": 0.1} for text in texts])
    assert frame.select("estimator", "budget").rows() == list(texts.values())


def test_a_policy_that_reads_no_estimate_has_none() -> None:
    frame = comparison.to_frame([{"policy": "exact/window:4,sink=2", "reads_metadata": 0.0}])
    assert frame.select("estimator", "budget").rows() == [("none", "window")]


def test_compute_has_both_tables(both: pl.DataFrame) -> None:
    assert both["table"].unique(maintain_order=True).to_list() == ["same_guarantee", "same_reads"]
    assert set(both["estimator"]) == {"exact", "mvar", "none"}
    assert both["requested"].dtype == pl.Float64


@pytest.mark.parametrize("kind", ["same_guarantee", "same_reads"])
def test_every_value_is_drawn_in_the_line_of_its_budget(both: pl.DataFrame, kind: str) -> None:
    import matplotlib.pyplot as plt

    table = both.filter(pl.col("table") == kind)
    column = "tokens_over_oracle" if kind == "same_guarantee" else "rows_below_target"
    _, ax = plt.subplots()
    assert comparison.plot(table, ax) is ax
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(labels) == table["budget"].n_unique()
    for estimator in ("exact", "mvar", "none"):
        part = table.filter(pl.col("estimator") == estimator)
        places = [labels.index(name.replace(":per-", ", per ").replace("_", " ")) for name in part["budget"]]
        drawn = [(round(height), value) for height, value in points(ax, estimator)]
        assert drawn == list(zip(places, part[column], strict=True))
    assert ax.get_title() == comparison.TITLES[kind]
    assert ax.get_xlabel()


def test_given_policies_have_a_line_each(trace: Trace) -> None:
    texts = ["exact/coverage:0.9", "mvar/coverage:0.9", "exact/fixed:3", "mvar/fixed:3@layer"]
    ax = comparison.plot(comparison.to_frame(given(trace, texts)))
    assert {label.get_text() for label in ax.get_yticklabels()} == set(texts)


def test_a_figure_has_every_table_with_intervals_or_without(both: pl.DataFrame, tmp_path: Path) -> None:
    single = Trace(synthetic.write(tmp_path / "t", replace(SHAPE, requests=1)))
    for table in (both, comparison.compute(single, target_rows=0.8)):
        figure = comparison.figure(table)
        figure.canvas.draw()
        assert [ax.get_title() for ax in figure.axes] == ["Same guarantee", "Same reads"]
