"""One small decode step through every kernel, checked: what compute-sanitizer watches.

compute-sanitizer --tool racecheck python tests/tools/decode_step.py
"""

import torch

from coverage_lab.bench.check import attention_error
from coverage_lab.bench.layers import make
from coverage_lab.bench.shapes import Geometry, Shape
from coverage_lab.kernels.decode import DecodePath


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    geometry = Geometry(kv_heads=2, group=6, head_dim=80, page_size=32)
    layer = make(Shape(1500, 3), geometry, device, 1, 0)[0]
    for budget in ({"gamma": 0.9}, {"count": 5}):
        path = DecodePath(layer.cache, 12, **budget)
        path.summarize()
        found = path(layer.query)
        print(attention_error("the path", found, layer, path.pages, path.counts), path.reads.tolist())


if __name__ == "__main__":
    main()
