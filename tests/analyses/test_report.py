"""The page: whole without a network, everything of the traces escaped, in a browser where there is one."""

import base64
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import polars as pl
import pytest
import synthetic

from coverage_lab.analyses import analyses, report
from coverage_lab.trace import Trace
from coverage_lab.trace.writer import TraceWriter

mpl.use("Agg")

SHAPE = synthetic.Shape(requests=3, layers=3, kv_heads=2, steps=(6, 3, 9), pages=(6, 25), seed=4)
BAD = "<script>alert(1)</script>\"'>&{{ 7 * 7 }}"
VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text; an error where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _, _ in self.attributes}

    @property
    def text(self) -> str:
        return "".join(self.words)


def hostile(path: Path) -> Trace:
    """A trace whose model, task, answers and error are markup."""
    run = synthetic.run_of(SHAPE)
    run["model"] = run["model"] | {"model": BAD}
    run["dataset"] = {"name": BAD}
    with TraceWriter(path, run) as writer:
        names = []
        for request in range(2):
            name, tokens, rows = synthetic.draw_request(SHAPE, request)
            line = synthetic.request_line(name, tokens, SHAPE.steps_of(request))
            writer.write(line | {"task": BAD, "answers": [BAD], "error": BAD}, rows)
            names.append(name)
        writer.finish(names, synthetic.facts_of(SHAPE))
    return Trace(path)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("report")
    return [Trace(synthetic.write(folder / "one", SHAPE)), hostile(folder / "two")]


@pytest.fixture(scope="module")
def text(traces: list[Trace]) -> str:
    return report.build(traces).html


def test_every_analysis_is_on_the_page(text: str, traces: list[Trace]) -> None:
    page = Page(text)
    anchors = {value for tag, name, value in page.attributes if (tag, name) == ("h2", "id")}
    needs = {f"need-map-{by}" for by in ("kv-head", "layer", "task", "context", "step")}
    sections = needs | set(analyses.names()) - {"need-map"}
    assert anchors == {"paper", "traces", *sections}
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert len(pictures) == len(traces) * len(sections)
    for picture in pictures:
        head, _, data = picture.partition(",")
        assert head == "data:image/svg+xml;base64"
        assert b"</svg>" in base64.b64decode(data)
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert {link.removeprefix("#") for link in links} <= anchors


def test_nothing_comes_from_elsewhere(text: str) -> None:
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "action", "srcset", "data"):
            assert value.startswith(("#", "data:image/svg+xml;base64,")), value
    assert "url(" not in text
    assert "@import" not in text


def test_what_a_trace_says_is_text(text: str) -> None:
    assert "<script" not in text
    said = Page(text).text
    # Word for word, not run: the model in headings and facts, the data set, the task, the answer, the error.
    assert said.count(BAD) >= 6


def test_figures_of_the_paper_stand_beside_ours(traces: list[Trace], text: str) -> None:
    said = Page(text).text
    table = analyses.get("variation")().compute(traces[0])
    for quantity, value in table.select("quantity", "value").iter_rows():
        assert quantity in said
        assert f"{value:.2f}" in said
    assert "lists that overflow the pages of the step before" in said


@pytest.mark.parametrize("name", analyses.names())
def test_findings_are_those_of_the_table(name: str, traces: list[Trace]) -> None:
    made = analyses.get(name)(**({"by": "layer"} if name == "need-map" else {}))
    table = made.compute(traces[0])
    numbers = [column.to_list() for column in table.select(pl.col(pl.Float64))]
    for finding in made.findings(table):
        assert finding.paper is not None
        assert any(finding.ours in column for column in numbers)


def test_the_same_traces_give_the_same_page(traces: list[Trace], text: str) -> None:
    assert report.build(traces).html == text


def test_what_a_trace_lacks_is_said_on_the_page(tmp_path: Path) -> None:
    shape = synthetic.Shape(requests=2, record="counts", page_size=64)
    said = Page(report.build([Trace(synthetic.write(tmp_path / "t", shape))]).html).text
    assert "collect it with --record shares" in said
    assert "How the need varies" in said


def test_traces_of_one_model_go_by_their_directories(tmp_path: Path) -> None:
    made = [Trace(synthetic.write(tmp_path / name, SHAPE)) for name in ("a", "b")]
    assert report._labels(made) == ["synthetic (a)", "synthetic (b)"]
    assert report._labels([made[0], made[0]]) == ["1: synthetic (a)", "2: synthetic (a)"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    from coverage_lab.cli import main

    monkeypatch.setattr("sys.argv", ["coverage-lab", "report", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command(
    traces: list[Trace],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [str(trace.path) for trace in traces]
    assert run(monkeypatch, *paths, "-o", str(tmp_path / "r.html"), "-q") == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == text
    assert capsys.readouterr().out == ""
    assert run(monkeypatch, paths[0], "-o", str(tmp_path / "s.html"), "--json", "-") == 0
    records = json.loads(capsys.readouterr().out)
    table = analyses.get("variation")().compute(traces[0])
    ours = {record["figure"]: record["ours"] for record in records}
    for quantity, value in table.select("quantity", "value").iter_rows():
        assert ours[quantity] == pytest.approx(value)
    for arguments, message in (
        ((*paths, "-o", str(tmp_path)), "is a directory; name a file in it"),
        ((*paths, "-o", str(tmp_path / "no" / "r.html")), "no directory"),
        ((str(tmp_path), "-o", str(tmp_path / "s.html")), "is no trace"),
    ):
        assert run(monkeypatch, *arguments) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert said.err.count("\n") == 1


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# A browser is no package of Python's, and CI has none: the tests above read the page without one.
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_a_browser_draws_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text(text, encoding="utf-8")
    base = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'u'}"]
    shot = tmp_path / "r.png"
    subprocess.run(
        [*base, "--window-size=1200,2000", f"--screenshot={shot}", f"file://{tmp_path / 'r.html'}"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert shot.stat().st_size > 50_000
