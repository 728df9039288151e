"""A copy of the keys in 2 bits."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.policies.estimators import Estimator, Summary, register
from coverage_lab.policies.estimators.int4 import page_log_mass

LEVELS = 3


@register("int2")
@dataclass(frozen=True, kw_only=True)
class Int2(Estimator):
    """Round every channel to 4 even steps from its least to its largest value in the page.

    FFD scores a block by its largest logit from such keys; as a mass it lets the other budgets use them. Left
    open by the source and chosen here: the page is the block, scale and offset in float16.
    """

    title = "2-bit copy of the keys"
    source = "FFD (Liu et al., 2026); paper, 2.1.2"

    def summarize(self, keys: Tensor) -> Summary:
        offset = keys.amin(-2, keepdim=True).half()
        step = ((keys.amax(-2, keepdim=True) - offset) / LEVELS).half()
        codes = ((keys - offset) / step.where(step > 0, 1)).round().clamp(0, LEVELS).byte()
        return Summary(keys.shape[-2], {"codes": codes, "offset": offset, "step": step})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        keys = summary["codes"] * summary["step"].float() + summary["offset"]
        return page_log_mass(query, keys)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        # Eight codes are as much as a value of the cache.
        return page_size * head_dim // 8 + 2 * head_dim
