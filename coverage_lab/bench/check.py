"""No time without a check: results against plain torch in float32, in the same run."""

from __future__ import annotations

from torch import Tensor

from coverage_lab.bench.layers import Layer
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.attend import reference

# Of a (request, query head): the norm of the error over that of the result. Half-precision operands give
# 1e-3 to 1e-2.
TOLERANCE = 2e-2


def attention_error(name: str, found: Tensor, layer: Layer, pages: Tensor, counts: Tensor) -> float:
    """Return the largest relative error of a query head against attention over the lists in float32.

    Raises
    ------
    CoverageLabError
        If it is too large to be rounding: a time would then mean nothing.
    """
    wanted = reference.attend(layer.query, layer.cache, pages, counts, layer.scale).float()
    error = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    worst = float(error.nan_to_num(nan=float("inf")).max())
    if worst > TOLERANCE:
        raise CoverageLabError(
            f"{name} is wrong: a relative error of {worst:.2g}, where rounding makes {TOLERANCE:g} at most"
        )
    return worst
