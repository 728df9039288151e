"""`coverage-lab datasets list|show|validate`, as a shell runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coverage_lab.cli import main
from coverage_lab.collectors.datasets import datasets

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coverage-lab", "datasets", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, said.out, said.err

    return command


def refused(run: Run, *arguments: object) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def model(zoo: Any) -> Path:
    return zoo.directory("llama")


def rows(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


QA = {"context": "c", "input": "i", "answers": ["a"]}


def test_list(run: Run):
    code, out, err = run("list")
    assert (code, err) == (0, "")
    assert "ruler         RULER, 13 tasks generated at any length\n" in out
    words = out.replace(",", " ").split()
    for name in datasets.names():
        assert name in words
        assert set(datasets.get(name).task_names) <= set(words)
    _, out, _ = run("list", "--json", "-")
    assert [(record["name"], len(record["tasks"])) for record in json.loads(out)] == [
        (name, len(datasets.get(name).task_names)) for name in datasets.names()
    ]


class TestShow:
    def test_without_a_tokenizer(self, run: Run, tmp_path: Path):
        rows(tmp_path / "a.jsonl", {"prompt": "one\ntwo " * 50, "answer": "three"}, {"prompt": "x"})
        code, out, _ = run("show", "jsonl", "--data-dir", tmp_path, "--characters", 15)
        assert code == 0
        assert out == (
            f"a-00000  400 characters  ({tmp_path}/a.jsonl:1)\n"
            "  begins  one two one two\n  ends    ne two one two\n  answers three\n\n"
        )
        assert run("show", "jsonl", "--data-dir", tmp_path, "--limit", 2)[1].count(" characters") == 2

    def test_ruler(self, run: Run, model: Path):
        options = (
            "--model",
            model,
            "--max-prompt-tokens",
            1200,
            "--limit",
            2,
            "--tasks",
            "niah_single_1,fwe",
        )
        code, out, _ = run("show", "ruler", *options, "--json", "-")
        assert code == 0
        records = json.loads(out)
        assert [record["request"] for record in records] == [
            "niah_single_1-00000",
            "niah_single_1-00001",
            "fwe-00000",
            "fwe-00001",
        ]
        for record in records:
            assert record["tokens"] <= 1200
            assert record["left_out"] == 0
            assert len(record["begins"]) == len(record["ends"]) == 200
        assert records[0]["prefix"].endswith(" mentioned in the provided text is")
        code, out, _ = run("show", "ruler", *options)
        assert f"  prefix  {records[0]['prefix'].strip()}\n  answers {records[0]['answers'][0]}\n" in out

    def test_what_is_left_out(self, run: Run, model: Path, tmp_path: Path):
        rows(tmp_path / "a.jsonl", {"prompt": "heron " * 100})
        options = ("--data-dir", tmp_path, "--model", model)
        _, out, _ = run("show", "jsonl", *options, "--max-prompt-tokens", 20)
        assert "600 characters, 20 tokens, " in out
        assert " left out  (" in out
        assert "left out" not in run("show", "jsonl", *options)[1]

    def test_bad_arguments(self, run: Run, tmp_path: Path):
        assert "did you mean 'longbench'" in refused(run, "show", "longbnch")
        assert "name the model with --model" in refused(run, "show", "ruler")
        assert "no such directory" in refused(run, "show", "longbench", "--data-dir", tmp_path / "absent")
        assert "unknown model 'smollm'" in refused(run, "show", "docs", "--model", "smollm")
        assert "no directory" in refused(run, "show", "docs", "--json", tmp_path / "none" / "a.json")
        assert "'--limit'" in refused(run, "show", "docs", "--limit", 0)


class TestValidate:
    def test_sound_files(self, run: Run, model: Path, tmp_path: Path):
        rows(tmp_path / "qasper.jsonl", QA, QA)
        rows(tmp_path / "lcc.jsonl", QA)
        code, out, err = run("validate", "longbench", "--data-dir", tmp_path)
        assert (code, err) == (0, "")
        assert out == "qasper: 2 prompts, 2 with answers: ok\nlcc: 1 prompts, 1 with answers: ok\n"
        _, out, _ = run("validate", "longbench", "--data-dir", tmp_path, "--model", model, "--json", "-")
        assert [record["faults"] for record in json.loads(out)] == [[], []]
        assert json.loads(out)[0]["longest"] > 50

    def test_each_task_has_its_faults(self, run: Run, tmp_path: Path):
        broken = rows(tmp_path / "qasper.jsonl", QA, "{")
        unanswered = rows(tmp_path / "hotpotqa.jsonl", *[QA | {"answers": []}] * 12)
        rows(tmp_path / "lcc.jsonl", QA)
        code, out, _ = run("validate", "longbench", "--data-dir", tmp_path)
        assert code == 1
        assert "qasper: 1 prompts, 1 with answers: 1 at fault\n" in out
        assert f"  {broken}:2: not valid JSON" in out
        assert "hotpotqa: 12 prompts, 0 with answers: 12 at fault\n" in out
        assert f"  {unanswered}:10: no answers\n  and 2 more; --json has them\n" in out
        assert "lcc: 1 prompts, 1 with answers: ok\n" in out

    def test_ruler(self, run: Run, model: Path):
        options = ("--model", model, "--tasks", "niah_single_1,fwe", "--limit", 2)
        code, out, _ = run("validate", "ruler", *options, "--max-prompt-tokens", 5000)
        assert code == 0
        assert out.count(": ok\n") == 2
        code, out, _ = run("validate", "ruler", *options, "--max-prompt-tokens", 100)
        assert code == 1
        assert out.count("0 prompts, 0 with answers: 1 at fault") == 2

    def test_a_length_that_is_off(self, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("coverage_lab.collectors.datasets.ruler.TOLERANCE", 100_000)
        options = ("--model", model, "--tasks", "vt", "--limit", 1, "--max-prompt-tokens", 5000)
        code, out, _ = run("validate", "ruler", *options)
        assert code == 1
        assert "tokens are not within 1% under 5000" in out

    def test_the_rest(self, run: Run, tmp_path: Path):
        rows(tmp_path / "a.jsonl", {"problem": "p", "answer": "5000"})
        code, out, _ = run("validate", "aime", "--data-dir", tmp_path)
        assert code == 1
        assert "a: 0 prompts, 0 with answers: 1 at fault" in out
        code, out, _ = run("validate", "longbench-v2", "--data-dir", tmp_path)
        assert code == 1
        assert "longbench-v2: 0 prompts" in out
        assert run("validate", "docs", "--limit", 3)[1] == "topics: 3 prompts, 0 with answers: ok\n"

    def test_bad_arguments(self, run: Run, tmp_path: Path):
        assert "name the model with --model" in refused(run, "validate", "ruler")
        assert "no *.jsonl in this directory" in refused(run, "validate", "aime", "--data-dir", tmp_path)
        assert "unknown task" in refused(run, "validate", "docs", "--tasks", "x")
