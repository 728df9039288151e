"""Rules that turn shares into a page set. A new one is a new file with a registered class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from coverage_lab.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from coverage_lab.kernels.select.reference import Ranking
    from coverage_lab.pages import Rows


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Base class of budgets: rank the pages, then keep the first few.

    A subclass gives `count` (or `counts`, for many budgets in one go), `at`, and `rank` where pages are
    not ranked by share.

    Attributes
    ----------
    title : str
        What it does, in a few words.
    source : str
        Where it comes from.
    primary : str
        The field that stands right after the colon in a policy's text.
    reads_shares : bool
        Whether the estimate is read at all; where not, no metadata is charged.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    primary: ClassVar[str]
    reads_shares: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Each is made of the other; a class with neither would call itself for ever.
        if cls.count is Budget.count and cls.counts.__func__ is Budget.counts.__func__:  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__} gives neither count nor counts")

    def requested(self) -> float | None:
        """Return the number that was asked for, in the budget's own unit."""
        value: float | None = getattr(self, self.primary)
        return value

    def order(self) -> Hashable:
        """Return what decides the order beside the shares: budgets with the same one share a ranking."""
        return None if type(self).rank is Budget.rank else self

    def rank(self, shares: Tensor, rows: Rows) -> Ranking:
        """Return the order in which pages are kept: forced pages, then by falling share."""
        from coverage_lab.kernels.select.reference import rank

        return rank(shares, rows)

    def count(self, ranking: Ranking) -> Tensor:
        """Return `[rows]` int64: how many pages of the ranking are kept, forced pages included."""
        return self.counts(ranking, [self])[:, 0]

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        """Return `[rows, len(budgets)]`: `count` of many budgets of this class over one ranking."""
        import torch

        return torch.stack([budget.count(ranking) for budget in budgets], 1)

    def select(self, shares: Tensor, rows: Rows) -> Tensor:
        """Return the page set.

        Parameters
        ----------
        shares : Tensor
            `[rows, width]`, estimated attention shares; padding is ignored.
        rows : Rows
            Geometry of the rows.

        Returns
        -------
        Tensor
            `[rows, width]` bool. The sink and the current page are always kept.
        """
        from coverage_lab.kernels.select.reference import take

        ranking = self.rank(shares, rows)
        return take(ranking, self.count(ranking))

    def at(self, level: float, max_pages: int) -> Self:
        """Return this budget at a level from 0 (reads least) to 1 (reads all); searches move along it.

        `max_pages` is the longest row of the data.
        """
        raise NotImplementedError


def whole_counts(counts: Tensor, ranking: Ranking) -> Tensor:
    """Return fractional page counts `[rows, J]` (float64) as whole ones whose mean over rows is the same.

    The result stays between the forced pages and all pages of the row.
    """
    n_pages = ranking.rows.n_pages[:, None]
    # The minimum comes before counts are whole: an integer can't hold any float.
    whole = (counts.minimum(n_pages) + ranking.rows.dither()[:, None]).floor_().long()
    return whole.maximum(ranking.n_forced[:, None]).minimum(n_pages)


def significant(value: float, digits: int = 5) -> float:
    """Return a value rounded to a few significant digits, so that searched budgets read well."""
    return float(f"{value:.{digits}g}")


budgets: Registry[Budget] = Registry("budget", __name__)
register = budgets.register
