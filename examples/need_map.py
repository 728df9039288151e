"""Draw how much of the context every KV head needs.

python examples/need_map.py TRACE need_map.png
"""

import sys

from coverage_lab import Trace
from coverage_lab.analyses import analyses

if len(sys.argv) != 3:
    sys.exit(__doc__)
trace, picture = Trace(sys.argv[1]), sys.argv[2]
analysis = analyses.get("need-map")(gamma=0.95, by="kv_head")
table = analysis.compute(trace)  # a polars frame
analysis.figure(table).savefig(picture, dpi=160)
