"""The coverage rule: the budget is an output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking, coverage_bisection, coverage_counts
from coverage_lab.pages import Rows
from coverage_lab.policies.budgets import Budget, register, significant


@register("coverage")
@dataclass(frozen=True, kw_only=True)
class Coverage(Budget):
    """Keep the fewest pages whose estimated shares sum to gamma, the forced pages counted once.

    Parameters
    ----------
    gamma : float
        Coverage in (0, 1]; 1 keeps every page.
    method : {"sort", "bisection"}
        How `select` finds the set. Both find the same one, so evaluation on a trace always sorts.
    thresholds : int
        Thresholds per pass of the bisection, the paper's K_B.
    """

    title = "coverage rule"
    source = "paper, 3.2, Eq. 3 and Algorithm 1"
    primary = "gamma"

    gamma: float = 0.98
    method: Literal["sort", "bisection"] = "sort"
    thresholds: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise CoverageLabError(f"coverage: gamma {self.gamma} is not in (0, 1]; try 0.98")
        if self.method not in ("sort", "bisection"):
            raise CoverageLabError(f"coverage: method {self.method!r} is not sort or bisection")
        if self.thresholds < 2 or self.thresholds & (self.thresholds - 1):
            raise CoverageLabError(
                f"coverage: thresholds {self.thresholds} is no power of two from 2 on; try 8"
            )

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        gammas = torch.tensor([b.gamma for b in budgets], dtype=torch.float64, device=ranking.order.device)
        return coverage_counts(ranking, gammas)

    def select(self, shares: Tensor, rows: Rows) -> Tensor:
        if self.method == "bisection":
            return coverage_bisection(shares, rows, self.gamma, self.thresholds)
        return super().select(shares, rows)

    def at(self, level: float, max_pages: int) -> Self:
        # Cubic, since reads rise steeply as gamma nears 1.
        return type(self)(gamma=min(1.0, max(1e-6, round(1 - significant((1 - level) ** 3, 4), 9))))
