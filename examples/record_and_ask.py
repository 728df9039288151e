"""Record a trace of a text of your own with the small model, and draw where its attention lies.

python examples/record_and_ask.py TEXT sinks.png
"""

import sys
import tempfile
from pathlib import Path

from coverage_lab import CollectOptions, Trace, collect
from coverage_lab.analyses import analyses

if len(sys.argv) != 3:
    sys.exit(__doc__)
text, picture = Path(sys.argv[1]), sys.argv[2]
with tempfile.TemporaryDirectory() as folder:
    options = CollectOptions(
        model="smollm2",
        dataset="text",
        data_dir=text,
        max_prompt_tokens=1024,
        steps=8,
        output=Path(folder) / "t",
    )
    collect(options)
    analysis = analyses.get("sinks")()
    analysis.figure(analysis.compute(Trace(options.output))).savefig(picture, dpi=160)
