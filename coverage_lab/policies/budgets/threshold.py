"""Every page above a share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import ONE, Ranking
from coverage_lab.policies.budgets import Budget, register, significant


@register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Budget):
    """Keep every page whose estimated share is at least a threshold.

    Parameters
    ----------
    share : float
        In [0, 1]; 0 keeps every page.
    """

    title = "share threshold"
    source = "thresholded scores, as in SeerAttention-R (Gao et al., 2025); paper, section 8"
    primary = "share"

    share: float = 0.005

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise CoverageLabError(f"threshold: share {self.share} is not in [0, 1]; try 0.005")

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        device = ranking.mass.device
        shares = torch.tensor([round(budget.share * ONE) for budget in budgets], device=device)
        # Forced pages come first and count whatever their share; after them the mass falls.
        places = torch.arange(ranking.mass.shape[1], device=device)
        falling = ranking.mass.masked_fill(places < ranking.n_forced[:, None], 2 * ONE)
        counts = torch.searchsorted(-falling, -shares.expand(len(falling), -1).contiguous(), right=True)
        return counts.minimum(ranking.rows.n_pages[:, None])

    def at(self, level: float, max_pages: int) -> Self:
        # Shares spread over nine decades, the resolution of fixed point.
        return type(self)(share=significant(10 ** (-9 * level)) if level < 1 else 0.0)
