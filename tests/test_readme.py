"""The README says what the committed results say, and names commands that exist."""

import re
import subprocess
import sys
from pathlib import Path

from coverage_lab.policies.policy import parse_policy

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_results() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_policies_parse() -> None:
    block = TEXT.split("| budget | keeps |")[1].split("Estimators:")[0]
    budgets = [text for text in re.findall(r"`([a-z]+:[^`]+)`", block) if "profiled" not in text]
    assert len(budgets) >= 6
    for text in budgets:
        parse_policy(f"exact/{text}")


def test_python_example_runs(synthetic_trace: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = next(block for block in blocks if "compare(trace)" in block)
    exec(code.replace('Trace("trace")', f"Trace({str(synthetic_trace)!r})"), {})
