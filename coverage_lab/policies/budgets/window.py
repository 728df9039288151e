"""The first pages and the latest ones, whatever the query."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking, rank
from coverage_lab.pages import Rows
from coverage_lab.policies.budgets import Budget, register, significant, whole_counts


@register("window")
@dataclass(frozen=True, kw_only=True)
class Window(Budget):
    """Keep the sink pages and a window of the latest pages.

    Parameters
    ----------
    local : float
        Latest pages, the current one included. A fraction is spread over rows.
    sink : int
        First pages of the request.
    """

    title = "sink and local window"
    source = "StreamingLLM (Xiao et al., 2024); DuoAttention (Xiao et al., 2025)"
    primary = "local"
    reads_shares = False

    local: float = 16
    sink: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.local < float("inf") or self.sink < 1:
            raise CoverageLabError(
                f"window: local={self.local} and sink={self.sink} must be at least 1 page each"
            )

    def order(self) -> Hashable:
        return self.name, self.sink

    def rank(self, shares: Tensor, rows: Rows) -> Ranking:
        width = shares.shape[1]
        columns = torch.arange(width, device=shares.device)
        recency = ((columns + 1.0) / (width + 1)).expand(len(rows), -1)
        return rank(recency, rows, self.sink)

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        # The current page is among the forced ones, so the window adds one page less.
        more = [budget.local - 1 for budget in budgets]
        wanted = torch.tensor(more, dtype=torch.float64, device=ranking.order.device)
        return whole_counts(ranking.n_forced[:, None] + wanted, ranking)

    def at(self, level: float, max_pages: int) -> Self:
        return type(self)(local=significant(1 + level * (max_pages - 1)), sink=self.sink)
