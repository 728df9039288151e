"""Every page whose share comes close to that of the sink and the local pages."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import ONE, Ranking, rank
from coverage_lab.pages import Rows
from coverage_lab.policies.budgets import Budget, register, significant


@register("delta")
@dataclass(frozen=True, kw_only=True)
class Delta(Budget):
    """Keep every page whose log mass lies within delta of the largest of the sink and the local pages.

    Those pages are always kept. FFD compares the largest logit of a block, for any query head of the group:
    `ffd/delta:7@query_head`. Left open by the source and chosen here: one sink and one local page.

    Parameters
    ----------
    delta : float
        Nats; below 0 a page must have more than the reference, and infinity keeps every page.
    sink, local : int
        Pages at the start and at the end that are kept, and that give the reference.
    """

    title = "distance to the sink and the local pages"
    source = "FFD (Liu et al., 2026); paper, 2.1.2"
    primary = "delta"

    delta: float = 7.0
    sink: int = 1
    local: int = 1

    def __post_init__(self) -> None:
        if not self.delta > -math.inf:
            raise CoverageLabError(f"delta: {self.delta} is no distance in nats; try 7")
        if self.sink < 1 or self.local < 1:
            raise CoverageLabError(
                f"delta: sink={self.sink} and local={self.local} must be at least 1 page each"
            )

    def order(self) -> Hashable:
        return self.name, self.sink, self.local

    def rank(self, shares: Tensor, rows: Rows) -> Ranking:
        return rank(shares, rows, self.sink, self.local)

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        mass = ranking.mass
        places = torch.arange(mass.shape[1], device=mass.device)
        forced = places < ranking.n_forced[:, None]
        # A reference below the resolution of shares counts as one unit.
        highest = mass.where(forced, 1).amax(1, keepdim=True).clamp(min=1).double()
        deltas = torch.tensor([budget.delta for budget in budgets], dtype=torch.float64, device=mass.device)
        least = (highest * (-deltas).exp()).clamp(max=2 * ONE).ceil().long().where(deltas < math.inf, 0)
        # Forced pages come first and count whatever their share; after them the mass falls.
        falling = mass.masked_fill(forced, torch.iinfo(torch.int64).max)
        counts = torch.searchsorted(-falling, -least, right=True)
        return counts.minimum(ranking.rows.n_pages[:, None])

    def at(self, level: float, max_pages: int) -> Self:
        # Shares span 21 nats, the resolution of fixed point.
        delta = significant(42 * level - 21) if level < 1 else math.inf
        return type(self)(delta=delta, sink=self.sink, local=self.local)
