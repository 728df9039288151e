"""Records of `bench attend` as a frame and as figures."""

from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from coverage_lab.analyses import attend_time
from coverage_lab.kernels.baselines import baselines

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def record(
    method: str, lists: str, cv: float, us: float, shape: str = "8kx32", **more: Any
) -> dict[str, Any]:
    return {"shape": shape, "lists": lists, "cv": cv, "method": method, "us": us, "plan_us": None, **more}


# As they come: by spread, and not in the order of the spread.
RECORDS = [
    record("attend-dense", "all", 0.0, 300.0),
    record("fa3-dense", "all", 0.0, 280.0),
    record("attend", "1", 1.01, 66.0),
    record("fa3-varlen", "1", 1.01, 120.0),
    record("flashinfer", "1", 1.01, 90.0, plan_us=812.5),
    record("attend", "0", 0.0, 61.0),
    record("fa3-varlen", "0", 0.0, 75.0),
    record("flashinfer", "0", 0.0, 80.0, plan_us=800.0),
    record("attend", "trace", 0.63, 64.0),
    record("fa3-varlen", "trace", 0.63, 110.0),
]
OTHER = [record("attend-dense", "all", 0.0, 500.0, "64kx8"), record("attend", "0", 0.0, 118.0, "64kx8")]


def panel(records: list[dict[str, Any]]) -> Axes:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    assert attend_time.plot(attend_time.to_frame(records), ax) is ax
    return ax


def lines(ax: Axes, style: str, marker: str = "None") -> dict[Any, list[tuple[float, float]]]:
    """Return the points of the lines of a style, by colour."""
    return {
        line.get_color(): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in ax.lines
        if (line.get_linestyle(), line.get_marker()) == (style, marker)
    }


def labelled(ax: Axes, label: str) -> Line2D:
    (line,) = (line for line in ax.lines if line.get_label() == label)
    return line


def test_a_frame_holds_every_record() -> None:
    frame = attend_time.to_frame(RECORDS)
    # The first records have no plan: a schema from these alone would have no room for the later ones'.
    assert frame["plan_us"].drop_nulls().to_list() == [812.5, 800.0]
    assert frame.to_dicts() == RECORDS


def test_every_method_has_a_name_in_the_legend() -> None:
    assert set(attend_time.TITLES) == {"attend", "attend-dense", *baselines.names()}
    assert len(set(attend_time.TITLES.values())) == len(attend_time.TITLES)


class TestPlot:
    def test_a_line_a_method_by_rising_spread(self) -> None:
        ax = panel(RECORDS)
        drawn = lines(ax, "-", "o")
        assert {line.get_label() for line in ax.lines if line.get_marker() == "o"} == {
            "coverage-lab",
            "FA3, varlen",
            "FlashInfer (plan apart)",
        }
        assert drawn[labelled(ax, "coverage-lab").get_color()] == [(0.0, 61.0), (1.01, 66.0)]
        assert drawn[labelled(ax, "FA3, varlen").get_color()] == [(0.0, 75.0), (1.01, 120.0)]
        assert len(drawn) == 3

    def test_dense_methods_go_across(self) -> None:
        ax = panel(RECORDS)
        across = {line.get_label(): line for line in ax.lines if line.get_linestyle() == "--"}
        assert {label: set(line.get_ydata()) for label, line in across.items()} == {
            "coverage-lab, dense": {300.0},
            "FA3, dense": {280.0},
        }
        assert all(list(line.get_xdata()) == [0, 1] for line in across.values())  # of the width of the axes

    def test_lists_of_a_trace_stand_apart_in_the_colour_of_their_method(self) -> None:
        ax = panel(RECORDS)
        (beyond,) = {x for points in lines(ax, "None", "D").values() for x, _ in points}
        assert beyond > 1.01 + 0.1
        assert {colour: [y for _, y in points] for colour, points in lines(ax, "None", "D").items()} == {
            labelled(ax, "coverage-lab").get_color(): [64.0],
            labelled(ax, "FA3, varlen").get_color(): [110.0],
        }
        ticks = dict(zip(ax.get_xticks(), [label.get_text() for label in ax.get_xticklabels()], strict=True))
        assert ticks[beyond] == "trace"
        assert ticks[0.25] == "0.25"

    def test_a_trace_alone(self) -> None:
        """No drawn lists: the markers stand in the legend, since no line does."""
        ax = panel([RECORDS[0], *RECORDS[-2:]])
        assert labelled(ax, "coverage-lab").get_marker() == "D"
        assert labelled(ax, "FA3, varlen").get_marker() == "D"
        assert not lines(ax, "-", "o")

    def test_times_start_at_nothing(self) -> None:
        ax = panel(RECORDS)
        assert ax.get_ylim()[0] == 0
        assert ax.get_ylim()[1] > 300
        assert (ax.get_title(), ax.get_xlabel()) == ("8kx32", "CV of list lengths")

    def test_without_a_trace_the_ticks_are_numbers(self) -> None:
        ax = panel(RECORDS[:-2])
        assert "trace" not in [label.get_text() for label in ax.get_xticklabels()]

    def test_a_method_has_one_colour_in_all_panels(self) -> None:
        one, other = panel(RECORDS), panel(OTHER)
        assert labelled(one, "coverage-lab").get_color() == labelled(other, "coverage-lab").get_color()


class TestFigure:
    def test_a_panel_a_shape_in_their_order(self) -> None:
        figure = attend_time.figure(attend_time.to_frame([*RECORDS, *OTHER]))
        figure.canvas.draw()
        assert [ax.get_title() for ax in figure.axes] == ["8kx32", "64kx8"]
        assert [lines(ax, "--") != {} for ax in figure.axes] == [True, True]
        (points,) = lines(figure.axes[1], "-", "o").values()
        assert points == [(0.0, 118.0)]
        assert figure.axes[0].get_ylabel() == "microseconds a layer"

    def test_the_legend_names_every_method_once(self) -> None:
        figure = attend_time.figure(attend_time.to_frame(RECORDS))
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            "coverage-lab",
            "FA3, varlen",
            "FlashInfer (plan apart)",
            "FA3, dense",
            "coverage-lab, dense",
        ]

    def test_of_one_shape(self) -> None:
        figure = attend_time.figure(attend_time.to_frame(OTHER))
        figure.canvas.draw()
        assert len(figure.axes) == 1


def test_a_method_without_a_title_is_drawn_under_its_name() -> None:
    """A new baseline is one new file, and no edit here."""
    records = [record("attend", "0", 0.0, 60.0), record("my-kernel", "0", 0.0, 50.0)]
    drawn = attend_time.figure(attend_time.to_frame(records))
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["coverage-lab", "my-kernel"]
