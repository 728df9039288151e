"""A copy of the keys in 4 bits."""

from dataclasses import dataclass

from coverage_lab.policies.estimators import register
from coverage_lab.policies.rounded import RoundedKeys


@register("int4")
@dataclass(frozen=True, kw_only=True)
class Int4(RoundedKeys):
    """Round the channels of every key to 16 even steps from the least to the largest of them.

    Left open by the source and chosen here: a scale and an offset a token, over all channels, in float16.
    """

    title = "4-bit copy of the keys"
    source = "paper, appendix A; Twilight (Lin et al., 2025) estimates weights from such keys"
    bits = 4
    axis = -1
