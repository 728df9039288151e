"""What estimators from a rounded copy of the keys have in common."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coverage_lab.policies.estimators import Estimator, Summary


@dataclass(frozen=True, kw_only=True)
class RoundedKeys(Estimator):
    """Round keys to even steps between the least and the largest value along an axis.

    Attributes
    ----------
    bits : int
        Of a code.
    axis : int
        Of `[heads, P, S, D]`: -1, a scale and an offset for every token, or -2, for every channel of a page.
    """

    bits: ClassVar[int]
    axis: ClassVar[int]

    def summarize(self, keys: Tensor) -> Summary:
        levels = 2**self.bits - 1
        offset = keys.amin(self.axis, keepdim=True).half()
        step = ((keys.amax(self.axis, keepdim=True) - offset) / levels).half()
        # Where all values are alike there is no step.
        codes = ((keys - offset) / step.where(step > 0, 1)).round().clamp(0, levels).byte()
        return Summary(keys.shape[-2], {"codes": codes, "offset": offset, "step": step})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        keys = summary["codes"] * summary["step"].float() + summary["offset"]
        logits = query @ keys.flatten(1, 2).transpose(-1, -2)
        return self.pool(logits.unflatten(-1, keys.shape[1:3]))

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        scales = page_size if self.axis == -1 else head_dim
        # A value of the cache has 16 bits.
        return page_size * head_dim * self.bits // 16 + 2 * scales
