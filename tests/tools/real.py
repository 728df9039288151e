"""Real data that lies beside a checkout; tests that use it run where it is, and CI must have it."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def shared(name: str) -> Path:
    """Return a file of the shared test data; without it the test is skipped, or fails in CI."""
    path = SHARED / name
    if not path.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{path} is missing")
        # A clone on its own has no such data, and its tests must pass; CI has it, and fails above.
        pytest.skip(f"{path} is missing")
    return path
