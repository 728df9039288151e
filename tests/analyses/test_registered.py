"""What every registered analysis must do, and what each finds: against plain NumPy."""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import plain
import polars as pl
import pytest
import synthetic

from coverage_lab.analyses import Analysis, analyses
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

mpl.use("Agg")

SHAPE = synthetic.Shape(requests=5, layers=3, kv_heads=2, steps=(6, 3, 9), pages=(5, 25), seed=4)
every_analysis = pytest.mark.parametrize("name", analyses.names())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("analyses") / "t", SHAPE))


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    from coverage_lab.cli import main

    monkeypatch.setattr("sys.argv", ["coverage-lab", "analyze", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


# Every analysis


@every_analysis
def test_is_a_frozen_dataclass_with_defaults(name: str) -> None:
    kind = analyses.get(name)
    assert dataclasses.is_dataclass(kind)
    made: Analysis = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.gamma = 1  # type: ignore[attr-defined]
    for text in (kind.title, kind.source, inspect.getdoc(kind) or ""):
        assert text == text.strip()
        assert len(text) > 3
    for field in dataclasses.fields(kind):
        assert f"{field.name} : " in (kind.__doc__ or ""), field.name


@every_analysis
def test_tables_are_tidy_and_figures_are_drawn(name: str, trace: Trace, tmp_path: Path) -> None:
    made = analyses.get(name)()
    table = made.compute(trace)
    assert table.equals(made.compute(trace))
    assert table.height > 0
    assert not any(isinstance(kind, pl.List | pl.Struct) for kind in table.schema.values())
    made.figure(table).savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 5000


@every_analysis
def test_the_command_has_the_fields_as_options(
    name: str, trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, str(trace.path), "--json", "-") == 0
    records = json.loads(capsys.readouterr().out)
    wanted = analyses.get(name)().compute(trace).to_dicts()
    assert [set(record) for record in records] == [set(record) for record in wanted]
    assert run(monkeypatch, name, "--help") == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(analyses.get(name)):
        assert f"--{field.name}" in said


def test_unknown_names_and_columns_are_one_line(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (("ned-map", str(trace.path)), "did you mean 'need-map'"),
        (("need-map", str(trace.path), "--by", "tsk"), "did you mean 'task'"),
        (("need-map", str(trace.path), "--gamma", "0.97"), "collect it with --gammas 0.97"),
        (("need-map", "nowhere"), "no trace at nowhere"),
    ):
        assert run(monkeypatch, *arguments) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert (said.out, said.err.count("\n")) == ("", 1)


def test_the_list_names_every_analysis(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == analyses.names()
    for line, name in zip(lines, analyses.names(), strict=True):
        assert line.endswith(f"{analyses.get(name).title} ({analyses.get(name).source})")
    assert run(monkeypatch, "--list", "sinks", str(trace.path)) == 2
    assert "leave out sinks" in capsys.readouterr().err


@pytest.fixture(scope="module")
def one_request(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    shape = synthetic.Shape(requests=1, layers=3, kv_heads=2, steps=4, pages=(20, 25), seed=4)
    return Trace(synthetic.write(tmp_path_factory.mktemp("one") / "t", shape))


@every_analysis
def test_one_request_has_no_interval(name: str, one_request: Trace, tmp_path: Path) -> None:
    made = analyses.get(name)()
    if name == "context-growth":
        with pytest.raises(CoverageLabError, match="growth needs requests of several lengths"):
            made.compute(one_request)
        return
    table = made.compute(one_request)
    for column in table.columns:
        if column.endswith(("ci_low", "ci_high")):
            assert table[column].is_nan().all(), column
    made.figure(table).savefig(tmp_path / "f.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimator-error", "--gamma", "1.5"), "--gamma 1.5 is not between 0 and 1"),
        (("estimator-error", "--fails", "-3"), "--fails -3 is not from 0 to 1"),
        (("estimator-error", "--estimator", "mvr"), "did you mean 'mvar'"),
        (("budgets", "--estimator", "nope"), "unknown estimator 'nope'"),
        (("stability", "--target", "nan"), "--target nan is not in (0, 1]"),
        (("need-map", "--gamma", "2"), "--gamma 2 is not in (0, 1]"),
        (("variation", "--gamma", "nan"), "--gamma nan is not in (0, 1]"),
        (("page-size", "--largest", "100"), "page size 100 is not a power of two"),
        (("coarsening", "--seed", "-1"), "greater than or equal to 0"),
    ],
)
def test_options_that_mean_nothing(
    arguments: tuple[str, ...],
    message: str,
    trace: Trace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *options = arguments
    assert run(monkeypatch, name, str(trace.path), *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# What they find


def fractions(trace: Trace) -> list[tuple[Any, float]]:
    """Every row with the part of its pages that it needs."""
    return [(row, row.recorded["oracle_pages_0.95"] / row.n_pages) for row in plain.rows_of(trace)]


@pytest.mark.parametrize(
    ("by", "group"),
    [
        ("kv_head", lambda row: (row.layer, row.kv_head)),
        ("layer", lambda row: (row.layer,)),
        ("task", lambda row: ("synthetic",)),
    ],
)
def test_need_map(trace: Trace, by: str, group: Any) -> None:
    table = analyses.get("need-map")(by=by).compute(trace)  # type: ignore[call-arg]
    wanted: dict[Any, list[float]] = {}
    for row, fraction in fractions(trace):
        wanted.setdefault(group(row), []).append(fraction)
    if by == "task":
        assert table.height == 1
        assert table["fraction"][0] == pytest.approx(np.mean(next(iter(wanted.values()))))
        return
    width = len(next(iter(wanted)))
    found = {line[:width]: line[width] for line in table.iter_rows()}
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key] == pytest.approx(np.mean(values))
    assert (table["ci_low"] <= table["fraction"]).all()
    assert (table["fraction"] <= table["ci_high"]).all()


@pytest.mark.parametrize(("by", "column"), [("context", "context"), ("step", "steps")])
def test_groups_of_a_quarter_each_hold_all_rows(trace: Trace, by: str, column: str) -> None:
    table = analyses.get("need-map")(by=by).compute(trace)  # type: ignore[call-arg]
    assert 2 <= table.height <= 4
    assert table["rows"].sum() == len(plain.rows_of(trace))
    overall = np.mean([fraction for _, fraction in fractions(trace)])
    assert np.average(table["fraction"], weights=table["rows"]) == pytest.approx(overall)
    starts = [int(text.split(" to ")[0]) for text in table[column]]
    assert starts == sorted(starts)


def grown(tmp_path: Path, exponent: float, lengths: tuple[int, ...] = (40, 80, 160, 320)) -> Trace:
    """A trace whose rows need `pages ** exponent` pages, all of equal share."""
    requests = []
    for tokens in lengths:
        pages = tokens // 4 + 1
        need = max(1, round(pages**exponent))
        # 0.95 of the mass takes all of the needed pages but for a twentieth of them.
        shares = [1 / need] * need + [0.0] * (pages - need)
        requests.append({"share": [[[shares]]]})
    path = synthetic.write_shares(tmp_path / f"g{exponent}", requests, prompt_tokens=list(lengths))
    return Trace(path)


@pytest.mark.parametrize("exponent", [1.0, 0.7])
def test_context_growth(tmp_path: Path, exponent: float) -> None:
    trace = grown(tmp_path, exponent)
    table = analyses.get("context-growth")().compute(trace)
    points = [(row.n_pages, row.recorded["oracle_pages_0.95"]) for row in plain.rows_of(trace)]
    slope = np.polyfit(*np.log(np.array(points, float)).T, 1)[0]
    assert table["exponent"].to_list() == pytest.approx([slope, slope])
    assert slope == pytest.approx(exponent, abs=0.08)
    assert table["layer"].to_list() == [None, 0]
    assert table["requests"].to_list() == [4, 4]


def test_growth_needs_contexts_of_several_lengths(tmp_path: Path) -> None:
    with pytest.raises(CoverageLabError, match="growth needs requests of several lengths"):
        analyses.get("context-growth")().compute(grown(tmp_path, 1.0, (40, 40)))
