"""The examples draw what they say, and the code of the pages runs."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

mpl.use("Agg")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCS = ROOT / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_draws(
    path: Path, synthetic_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = synthetic_trace
    if path.stem == "record_and_ask":
        given = tmp_path / "text.txt"
        given.write_text("The keeper of the light wrote down the wind and the tide. " * 25)
    picture = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", [str(path), str(given), str(picture)])
    runpy.run_path(str(path), run_name="__main__")
    assert picture.stat().st_size > 10_000


def test_policies_in_python(synthetic_trace: Path) -> None:
    (code,) = blocks("policies.md")
    names: dict[str, Any] = {}
    exec(code.replace('Trace("trace")', f"Trace({str(synthetic_trace)!r})"), names)
    assert names["result"].kept.shape[1] == 3


def test_reading_a_trace(synthetic_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(synthetic_trace.parent)
    plain, ours = (code.replace('"trace', f'"{synthetic_trace.name}') for code in blocks("trace.md"))
    names: dict[str, Any] = {}
    exec(plain, names)
    assert names["by_layer"]["fraction"].is_between(0, 1).all()
    assert names["top"].height == 3
    exec(ours, names)
    assert names["block"].columns["share"].ndim == 2


def test_what_is_added_works(synthetic_trace: Path) -> None:
    """Run in a process of its own: the classes would stay registered."""
    estimator, budget, analysis = blocks("extending.md")
    check = f"""
import torch
from coverage_lab import Policy, Trace, estimators, evaluate
from coverage_lab.policies.compare import matched
made = estimators.get("halves")()
keys = torch.randn(2, 3, 64, 16)
query = 0.3 * torch.randn(2, 4, 16)
found = made.log_mass(query, made.summarize(keys))
assert found.shape == (2, 4, 3)
whole = torch.einsum("hgd,hpsd->hgps", query, keys.reshape(2, 3, 2, 32, 16).mean(-2))
assert torch.allclose(found, (32 * whole.exp()).sum(-1).log(), atol=1e-5)
trace = Trace({str(synthetic_trace)!r})
result = evaluate(trace, [Policy.parse("exact/root:2"), Policy.parse("exact/coverage:0.9")])
assert 0 < result.kept[:, 0].sum() < result.pages.sum()
anchor, root = matched(trace, "exact/coverage:0.9", ["root"])(0)
both = evaluate(trace, [anchor, root])
assert abs(both.kept[:, 1].sum() / both.kept[:, 0].sum() - 1) < 0.01
from coverage_lab.analyses import analyses, report
table = analyses.get("need-by-depth")().compute(trace)
assert table["part"].to_list() == [0, 1] and table["fraction"].is_between(0, 1).all()
assert 'id="need-by-depth"' in report.build([trace]).html
"""
    run = subprocess.run(
        [sys.executable, "-c", estimator + budget + analysis + check], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_messages_of_the_page_are_those_of_the_code() -> None:
    """Every message that docs/errors.md quotes is one that the code gives, word for word."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "coverage_lab").rglob("*.py"))
    # Texts that are broken over lines of code stand as one.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    table = (DOCS / "errors.md").read_text(encoding="utf-8").split("| message |")[1].split("\n\n")[0]
    quoted = [
        text for line in table.splitlines()[2:] for text in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(quoted) >= 15
    assert [text for text in quoted if text not in source] == []
