"""The largest logit of a page, from a copy of the keys in 2 bits."""

import math
from dataclasses import dataclass

from torch import Tensor

from coverage_lab.policies.estimators import register
from coverage_lab.policies.rounded import RoundedKeys


@register("ffd")
@dataclass(frozen=True, kw_only=True)
class Ffd(RoundedKeys):
    """Take the largest logit of the rounded keys of a page, and every key of it at that logit.

    FFD itself keeps the pages that come within delta of a reference: `ffd/delta:7@query_head`. Left open by
    the source and chosen here: the page is the block, scale and offset are float16.
    """

    title = "largest logit of a 2-bit copy"
    source = "FFD (Liu et al., 2026); paper, 2.1.2"
    bits = 2
    axis = -2

    def pool(self, logits: Tensor) -> Tensor:
        return logits.amax(-1) + math.log(logits.shape[-1])
