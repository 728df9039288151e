"""Time and memory of every analysis on a small, a tenfold and a large trace.

    python benchmarks/analyses.py [--rows 50000000] [--folder DIR]

Every analysis runs in a process of its own. The traces are synthetic (tests/tools/synthetic.py): 32 layers, 8
KV heads, 64 steps, 8 to 16 pages a row, exact shares and one estimate. `--folder` keeps them for another run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from harness import peak_memory_mib, save

from coverage_lab.analyses import analyses

SYNTHETIC = Path(__file__).parents[1] / "tests" / "tools" / "synthetic.py"
SHAPE = ["--layers", "32", "--kv-heads", "8", "--steps", "64", "--pages", "16", "--fewest-pages", "8"]

RUN = """
import sys, time
from coverage_lab.analyses import analyses
from coverage_lab.trace import Trace
start = time.perf_counter()
analyses.get(sys.argv[2])().compute(Trace(sys.argv[1]))
open(sys.argv[3], "w").write(str(time.perf_counter() - start))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=50_000_000, help="of the large trace")
    parser.add_argument("--folder", type=Path, help="where the traces are kept")
    options = parser.parse_args()
    sizes = {"small": options.rows // 100, "middle": options.rows // 10, "large": options.rows}
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        rows = {name: write(Path(folder) / name, size) for name, size in sizes.items()}
        figures: dict[str, Any] = {}
        for analysis in analyses.names():
            found = {name: measured(Path(folder) / name, analysis) for name in sizes}
            figures[analysis] = {
                "seconds": {name: round(seconds, 1) for name, (seconds, _) in found.items()},
                "peak_memory_mib": {name: round(memory) for name, (_, memory) in found.items()},
                "seconds_large_over_middle": round(found["large"][0] / found["middle"][0], 2),
                "memory_large_over_middle": round(found["large"][1] / found["middle"][1], 2),
            }
            print(analysis, figures[analysis], flush=True)
    save("analyses", {"rows": rows, "analyses": figures})


def write(path: Path, rows: int) -> int:
    """Write a synthetic trace, unless it is there, and return its rows."""
    from coverage_lab.trace import Trace

    command = [sys.executable, str(SYNTHETIC), str(path), "--rows", str(rows), *SHAPE]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    written = sum(shard.rows for shard in Trace(path).shards)
    print(f"{written:,} rows written in {time.perf_counter() - start:.0f} s", flush=True)
    return written


def measured(trace: Path, analysis: str) -> tuple[float, float]:
    """Return the seconds that an analysis takes, and the most memory it holds, in MiB."""
    with tempfile.NamedTemporaryFile() as file:
        memory = peak_memory_mib(RUN, str(trace), analysis, file.name)
        return float(Path(file.name).read_text()), memory


if __name__ == "__main__":
    main()
