"""What importing the package costs: heavy libraries load only when they are used.

Import-linter holds which part may import which (pyproject.toml); it cannot tell an import at the top of
a module from one inside a function, and these tests can.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import coverage_lab

DRAWING = {"matplotlib", "pandas", "seaborn"}
MODELS = {"accelerate", "gguf", "torch", "transformers", "triton"}
TABLES = {"polars", "scipy"}

PACKAGE = Path(coverage_lab.__file__).parent
ANALYSES = [f"coverage_lab.analyses.{path.stem}" for path in sorted(PACKAGE.glob("analyses/[!_]*.py"))]

# Part -> (modules to import, what none of them may load).
NOT_LOADED = {
    "package": (["coverage_lab"], DRAWING | MODELS | TABLES),
    "errors, registry": (["coverage_lab.errors", "coverage_lab.registry"], DRAWING | MODELS | TABLES),
    "pages": (["coverage_lab.pages"], DRAWING | MODELS | TABLES),
    "trace": (["coverage_lab.trace"], DRAWING | MODELS),
    "kernels": (["coverage_lab.kernels"], DRAWING | TABLES | {"transformers", "triton"}),
    "policies": (["coverage_lab.policies", "coverage_lab.policies.evaluate"], DRAWING | {"transformers"}),
    "analyses": (["coverage_lab.analyses", *ANALYSES], DRAWING | MODELS),
    "cli": (["coverage_lab.cli"], DRAWING | MODELS | TABLES),
}

HELP = """
import contextlib, io
from coverage_lab.cli import app
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    app(["--help"])
"""


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after running `code`."""
    report = "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    run = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("part", NOT_LOADED)
def test_importing_loads_nothing_heavy(part: str) -> None:
    modules, banned = NOT_LOADED[part]
    assert not loaded_by("\n".join(f"import {module}" for module in modules)) & banned


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_by(HELP) & (DRAWING | MODELS | TABLES)


def test_help_is_quick() -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-c", HELP], check=True)
        after = os.times()
        # Processor time: other work on the machine does not count.
        seconds.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert statistics.median(seconds) < 0.8


@pytest.mark.parametrize("name", coverage_lab.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(coverage_lab, name) is not None
    assert name in dir(coverage_lab)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = coverage_lab.nonsense
