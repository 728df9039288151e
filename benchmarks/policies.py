"""How quickly policies are evaluated on a trace, and in how much memory.

    python benchmarks/policies.py [--rows 200000] [--large 2000000]

Times are of whole calls: files read, checked, unpacked, ranked and counted. The traces are synthetic
(tests/tools/synthetic.py), 100 pages a row, with the exact shares and one estimator.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from harness import peak_memory_mib, save

from coverage_lab.pages import Rows
from coverage_lab.policies.evaluate import evaluate
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.trace import Trace

SYNTHETIC = Path(__file__).parents[1] / "tests" / "tools" / "synthetic.py"
PAGES = 100

COMPARE = """
import sys
from coverage_lab.policies.compare import compare
from coverage_lab.trace import Trace
compare(Trace(sys.argv[1]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--large", type=int, default=2_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        for path, rows in ((small, options.rows), (large, options.large)):
            command = [sys.executable, str(SYNTHETIC), str(path), "--rows", str(rows), "--pages", str(PAGES)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        peaks = {path.name: peak_memory_mib(COMPARE, str(path)) for path in (small, large)}
        trace = Trace(small)
        rows = sum(shard.rows for shard in trace.shards)
        one = [parse_policy("mvar/coverage:0.98")]
        sweep = [parse_policy(f"mvar/coverage:{0.80 + 0.01 * step:.2f}") for step in range(20)]
        check(trace, one[0])
        one_seconds = median_seconds(lambda: evaluate(trace, one))
        sweep_seconds = median_seconds(lambda: evaluate(trace, sweep))
    save(
        "policies",
        {
            "rows": rows,
            "pages_a_row": PAGES,
            "one_policy_seconds": round(one_seconds, 3),
            "rows_per_second": round(rows / one_seconds),
            "twenty_gammas_over_one": round(sweep_seconds / one_seconds, 2),
            "compare_peak_memory_mib": {name: round(peak) for name, peak in peaks.items()},
            "compare_rows": {"small": options.rows, "large": options.large},
            "memory_large_over_small": round(peaks["large"] / peaks["small"], 3),
        },
    )


def check(trace: Trace, policy: Policy) -> None:
    """Compare the pages that evaluation counts with the sets that bisection finds."""
    bisection = replace(policy.budget, method="bisection")
    found = 0
    for block in trace.blocks(["share", "share_mvar"]):
        if block.request > 0:
            break
        names = ("n_pages", "first_page", "position", "layer", "kv_head")
        rows = Rows(
            **{name: torch.from_numpy(block.columns[name]) for name in names}, page_size=trace.page_size
        )
        found += int(bisection.select(torch.from_numpy(block.columns["share_mvar"]), rows).sum())
    assert found == evaluate(trace, [policy]).kept[0, 0], "sorting and bisection keep different pages"


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
