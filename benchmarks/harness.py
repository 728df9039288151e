"""What every benchmark shares: where it ran, peak memory of a command, the results file."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Return the processor, its threads and the versions that matter."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "polars", "numpy")},
    }


def peak_memory_mib(code: str, *arguments: str) -> float:
    """Run Python code in a process of its own and return the most memory it held, in MiB."""
    # The child reports its own peak: RUSAGE_CHILDREN of this process would be the largest of all children.
    report = "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-c", code + report, *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return int(run.stdout.splitlines()[-1]) / 1024


def save(name: str, figures: dict[str, Any]) -> None:
    """Print the figures and write them, with the machine, to `results/<name>.json`."""
    record = {"benchmark": name, "machine": machine(), **figures}
    text = json.dumps(record, indent=1)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
