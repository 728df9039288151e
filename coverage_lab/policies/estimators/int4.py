"""A copy of the keys in 4 bits."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.policies.estimators import Estimator, Summary, register

LEVELS = 15


@register("int4")
@dataclass(frozen=True, kw_only=True)
class Int4(Estimator):
    """Round the channels of every key to 16 even steps from the least to the largest of them.

    Left open by the source and chosen here: a scale and an offset a token, over all channels, in float16.
    """

    title = "4-bit copy of the keys"
    source = "paper, appendix A; Twilight (Lin et al., 2025) estimates weights from such keys"

    def summarize(self, keys: Tensor) -> Summary:
        offset = keys.amin(-1, keepdim=True).half()
        step = ((keys.amax(-1, keepdim=True) - offset) / LEVELS).half()
        # A key whose channels are all alike has no step.
        codes = ((keys - offset) / step.where(step > 0, 1)).round().clamp(0, LEVELS).byte()
        return Summary(keys.shape[-2], {"codes": codes, "offset": offset, "step": step})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        keys = summary["codes"] * summary["step"].float() + summary["offset"]
        return page_log_mass(query, keys)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        # Four codes are as much as a value of the cache.
        return page_size * head_dim // 4 + 2 * page_size


def page_log_mass(query: Tensor, keys: Tensor) -> Tensor:
    """Return the log mass of whole pages, `[heads, G, P]`.

    `query` is `[heads, G, D]`, scaled already, `keys` `[heads, P, S, D]`.
    """
    logits = query @ keys.flatten(1, 2).transpose(-1, -2)
    return logits.unflatten(-1, keys.shape[1:3]).logsumexp(-1)
