"""A few keys of a page that stand for all of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coverage_lab.policies.estimators import Estimator, Summary, register

KEYS = 4


@register("sampled")
@dataclass(frozen=True, kw_only=True)
class Sampled(Estimator):
    """Take the mean of `exp(query . key)` over four keys of a page for that over all of them.

    Left open by the source and chosen here: the sample is stratified and not random, so that it does not
    depend on a seed or on the order of the keys. Keys are ranked by their norm, and the four in the middle of
    each quarter are taken.
    """

    title = "four keys of a page"
    source = "sampled attention: MagicPIG (Chen et al., 2024), vAttention (Desai et al., 2026)"

    def summarize(self, keys: Tensor) -> Summary:
        size = keys.shape[-2]
        taken = min(KEYS, size)
        places = ((torch.arange(taken, device=keys.device) + 0.5) * size / taken).long()
        chosen = keys.norm(dim=-1).argsort(-1)[..., places, None].expand(*keys.shape[:-2], -1, keys.shape[-1])
        return Summary(size, {"keys": keys.gather(-2, chosen)})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        keys = summary["keys"]
        logits = (query @ keys.flatten(1, 2).transpose(-1, -2)).unflatten(-1, keys.shape[1:3])
        return logits.logsumexp(-1) + math.log(summary.page_size / keys.shape[2])

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        return min(KEYS, page_size) * head_dim
