"""One count for every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking
from coverage_lab.policies.budgets import Budget, register, significant, whole_counts


@register("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Budget):
    """Keep the same number of pages, or of tokens, in every row; shorter rows are read whole.

    Parameters
    ----------
    pages : float, optional
        Pages a row, forced ones included. A fraction is spread over rows, so that the mean is exact.
    tokens : int, optional
        The same in tokens, rounded up to pages. Give one of the two.
    """

    title = "fixed count"
    source = "paper, 5.5.2; Quest (Tang et al., 2024)"
    primary = "pages"

    pages: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pages is None and self.tokens is None:
            object.__setattr__(self, "pages", 64)
        if self.pages is not None and self.tokens is not None:
            raise CoverageLabError("fixed: give pages or tokens, not both")
        value = self.pages if self.pages is not None else self.tokens
        if value is None or not 1 <= value < float("inf"):
            raise CoverageLabError(
                f"fixed: a budget of {value} is no number of pages from 1 on; try fixed:64"
            )

    def requested(self) -> float | None:
        return self.pages if self.tokens is None else self.tokens

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        pages = [budget.in_pages(ranking.rows.page_size) for budget in budgets]
        wanted = torch.tensor(pages, dtype=torch.float64, device=ranking.order.device)
        return whole_counts(wanted.expand(len(ranking.order), -1), ranking)

    def in_pages(self, page_size: int) -> float:
        """Return the count in pages of so many tokens."""
        return float(self.pages or 0) if self.tokens is None else float(-(-self.tokens // page_size))

    def at(self, level: float, max_pages: int) -> Self:
        return type(self)(pages=significant(1 + level * (max_pages - 1)))
