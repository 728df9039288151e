"""One fraction for every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking
from coverage_lab.policies.budgets import Budget, register, significant, whole_counts


@register("proportional")
@dataclass(frozen=True, kw_only=True)
class Proportional(Budget):
    """Keep the same fraction of the pages of every row.

    Parameters
    ----------
    fraction : float
        In (0, 1]; fractional counts are spread over rows, so that the mean is exact.
    """

    title = "proportional top-k"
    source = "paper, 5.5.2"
    primary = "fraction"

    fraction: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise CoverageLabError(f"proportional: fraction {self.fraction} is not in (0, 1]; try 0.25")

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        fractions = [budget.fraction for budget in budgets]
        wanted = torch.tensor(fractions, dtype=torch.float64, device=ranking.order.device)
        return whole_counts(ranking.rows.n_pages[:, None] * wanted, ranking)

    def at(self, level: float, max_pages: int) -> Self:
        return type(self)(fraction=significant(max(level, 1e-9)))
