"""How quickly policies are evaluated on a trace, and in how much memory.

    python benchmarks/policies.py [--rows 200000] [--large 2000000]

`rows_per_second` is with the rows in memory: ranked, counted and summed. `rows_per_second_from_files` is
of whole calls, where most of the time goes into unpacking Parquet lists. The traces are synthetic
(tests/tools/synthetic.py), 100 pages a row, with the exact shares and one estimator.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from harness import peak_memory_mib, save

from coverage_lab.pages import Rows
from coverage_lab.policies.budgets.coverage import Coverage
from coverage_lab.policies.evaluate import evaluate
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.trace import Span, Trace
from coverage_lab.trace.reader import BLOCK_ELEMENTS

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
        seconds = {
            (where, what): median_seconds(partial(evaluate, source, policies))
            for where, source in (("files", trace), ("memory", InMemory(small)))
            for what, policies in (("one", one), ("sweep", sweep))
        }
    save(
        "policies",
        {
            "rows": rows,
            "pages_a_row": PAGES,
            "rows_per_second": round(rows / seconds["memory", "one"]),
            "rows_per_second_from_files": round(rows / seconds["files", "one"]),
            "twenty_gammas_over_one": round(seconds["memory", "sweep"] / seconds["memory", "one"], 2),
            "twenty_gammas_over_one_from_files": round(
                seconds["files", "sweep"] / seconds["files", "one"], 2
            ),
            "compare_peak_memory_mib": {name: round(peak) for name, peak in peaks.items()},
            "compare_rows": {"small": options.rows, "large": options.large},
            "memory_large_over_small": round(peaks["large"] / peaks["small"], 3),
        },
    )


class InMemory(Trace):
    """A trace whose blocks are read once and kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held: list[Span] = []

    def spans(self, columns: Sequence[str], elements: int = BLOCK_ELEMENTS) -> Iterator[Span]:
        if not self._held:  # the policies here all need the same columns
            for span in super().spans(columns, elements):
                self._held.append(Span(span.request, cache(span.read)))
        return iter(self._held)


def check(trace: Trace, policy: Policy) -> None:
    """Compare the pages that evaluation counts with the sets that bisection finds."""
    bisection = Coverage(gamma=policy.budget.requested() or 1.0, method="bisection")
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
