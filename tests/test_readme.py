"""The README and the pages of docs/ say what the committed results say, and name what exists."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command

from coverage_lab.cli import app
from coverage_lab.policies.policy import parse_policy

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = PAGES[0].read_text(encoding="utf-8")


def test_tables_are_those_of_the_results() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """Every command and option that a page names is one that `--help` lists."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(
        r"(?m)(?:^|`)coverage-lab ((?:(?:analyze|bench|datasets|reproduce) )?[a-z][a-z-]*(?:\|[a-z|-]+)?)"
        r"([^`\n#]*)",
        text,
    )
    assert lines
    for names, rest in lines:
        words, options = names.split(), re.findall(r"--[a-z-]+", rest)
        for verb in words[-1].split("|"):
            command: Any = get_command(app)
            context = None
            for word in [*words[:-1], verb]:
                context = typer.Context(command, parent=context)
                command = command.get_command(context, word)
                assert command is not None, words
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(options) <= known | {"--help"}, (verb, options)


def test_policies_parse() -> None:
    block = TEXT.split("| budget | keeps |")[1].split("Estimators:")[0]
    budgets = [text for text in re.findall(r"`([a-z]+:[^`]+)`", block) if "profiled" not in text]
    assert len(budgets) >= 6
    for text in budgets:
        parse_policy(f"exact/{text}")


def test_methods_of_the_replay_page_parse() -> None:
    table = (ROOT / "docs" / "replay.md").read_text().split("| method | policy |")[1].split("\n\n")[0]
    texts = re.findall(r"`([a-z0-9]+/[^`]+)`", table)
    assert len(texts) >= 8
    for text in texts:
        assert str(parse_policy(text)) == text


def test_decoder_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(next(block for block in blocks if "Decoder" in block), {})
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "replay.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(names["answer"]) == 8
    assert 0 < names["kept"] <= names["pages"]


def test_python_example_runs(synthetic_trace: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = next(block for block in blocks if "compare(trace)" in block)
    exec(code.replace('Trace("trace")', f"Trace({str(synthetic_trace)!r})"), {})


def test_kernel_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        # Plain torch, as a reader without a GPU has it.
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kernels.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (2, 32, 128)
    assert names["path"].reads.tolist() == [int(names["path"].counts.sum()), 8 * (16 + 19)]
    again = names["attend"](names["query"], names["cache"], names["path"].pages, names["path"].counts)
    assert torch.equal(again, names["out"])
