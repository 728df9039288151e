"""Every page above a share."""

from dataclasses import dataclass
from typing import Self

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

    def count(self, ranking: Ranking) -> Tensor:
        n_pages = ranking.rows.n_pages
        if self.share == 0:
            return n_pages
        # Only pages of the row have mass, so padding never counts. Forced pages come first in the ranking
        # and count even below the threshold.
        above = ranking.mass >= max(1, round(self.share * ONE))
        above.scatter_(1, (ranking.n_forced - 1)[:, None], True)
        above[:, 0] = True
        return above.sum(1).minimum(n_pages)

    def at(self, level: float, max_pages: int) -> Self:
        # Shares spread over nine decades, the resolution of fixed point.
        return type(self)(share=significant(10 ** (-9 * level)) if level < 1 else 0.0)
