"""A copy of the keys in 2 bits."""

from dataclasses import dataclass

from coverage_lab.policies.estimators import register
from coverage_lab.policies.rounded import RoundedKeys


@register("int2")
@dataclass(frozen=True, kw_only=True)
class Int2(RoundedKeys):
    """Round every channel to 4 even steps from its least to its largest value in the page.

    FFD scores a block by its largest logit from such keys (the estimator `ffd`); here all logits count. Left
    open by the source and chosen here: the page is the block, scale and offset in float16.
    """

    title = "2-bit copy of the keys"
    source = "FFD (Liu et al., 2026); paper, 2.1.2"
    bits = 2
    axis = -2
