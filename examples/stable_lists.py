"""Draw what becomes of page lists that are used for several steps.

python examples/stable_lists.py TRACE stable.png
"""

import sys

from coverage_lab import Trace
from coverage_lab.analyses import analyses

if len(sys.argv) != 3:
    sys.exit(__doc__)
trace, picture = Trace(sys.argv[1]), sys.argv[2]
analysis = analyses.get("stability")(policy="mvar/coverage:0.98")
analysis.figure(analysis.compute(trace)).savefig(picture, dpi=160)
