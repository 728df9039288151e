"""Draw on which KV heads an estimate fails, and say which they are.

python examples/failing_heads.py TRACE heads.png
"""

import sys

import polars as pl

from coverage_lab import Trace
from coverage_lab.analyses import analyses

if len(sys.argv) != 3:
    sys.exit(__doc__)
trace, picture = Trace(sys.argv[1]), sys.argv[2]
analysis = analyses.get("estimator-error")(estimator="mvar", gamma=0.95)
table = analysis.compute(trace)
print(table.filter(pl.col("fails")).select("layer", "kv_head", "log_error", "coverage"))
analysis.figure(table).savefig(picture, dpi=160)
