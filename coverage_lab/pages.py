"""Page geometry: which pages a row has, and which of them are always kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from torch import Tensor

MAX_PAGE_SIZE = 1024

# Fractional parts of the powers of the root of x^4 = x + 1: a low-discrepancy sequence in three dimensions.
_DITHER = (0.8191725133961644, 0.6710436067037892, 0.5497004779019702)


def check_page_size(page_size: int) -> int:
    """Return `page_size`, or raise CoverageLabError if it is no power of two from 1 to 1024."""
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise CoverageLabError(
            f"page size {page_size} is not a power of two from 1 to {MAX_PAGE_SIZE}; try 64"
        )
    return page_size


def page_range(position: int, page_size: int, window: int | None = None) -> tuple[int, int]:
    """Return the pages that a query can see.

    Parameters
    ----------
    position : int
        Token position of the query, counted from the request's first token.
    page_size : int
        Tokens a page.
    window : int, optional
        Sliding window of the layer in tokens, the query's own included; None for full attention.

    Returns
    -------
    first_page, n_pages : int
        Absolute number of the oldest page with a visible token, and how many pages there are from it on.
    """
    oldest = 0 if window is None else max(0, position - window + 1)
    first = oldest // page_size
    return first, position // page_size + 1 - first


@dataclass(frozen=True)
class Rows:
    """Geometry of a block of rows; a row is one (request, layer, KV head, step).

    Matrices over a block are `[rows, width]`: column c of a row is its page `first_page + c`, and
    columns from `n_pages` on are padding.

    Parameters
    ----------
    n_pages, first_page, position : Tensor
        `[rows]` int64: pages of the row, absolute number of its first one, position of its query.
    layer, kv_head : Tensor
        `[rows]` int64; KV head -1 stands for a list that all KV heads of the layer share.
    page_size : int
        Tokens a page.
    fewest : int, optional
        Pages of the shortest row, where the host knows it: else it asks the device, and waits.
    """

    n_pages: Tensor
    first_page: Tensor
    position: Tensor
    layer: Tensor
    kv_head: Tensor
    page_size: int
    fewest: int | None = None

    def __len__(self) -> int:
        return len(self.n_pages)

    def valid(self, columns: int | range) -> Tensor:
        """Return `[rows, columns]` bool: which columns (an int: the first so many) are pages of the row."""
        return self._columns(columns) < self.n_pages[:, None]

    def forced(self, columns: int | range, sink: int = 1, local: int = 1) -> Tensor:
        """Return `[rows, columns]` bool: the first `sink` pages, if still seen, and the last `local` ones."""
        places, end = self._columns(columns), self.n_pages[:, None]
        recent = (places >= end - local) & (places < end)
        return recent | ((places + self.first_page[:, None] < sink) & (places < end))

    def n_forced(self, sink: int = 1, local: int = 1) -> Tensor:
        """Return `[rows]` int64: how many pages are forced."""
        recent = self.n_pages.clamp(max=local)
        return recent + (sink - self.first_page).clamp(min=0).minimum(self.n_pages - recent)

    def dither(self) -> Tensor:
        """Return `[rows]` float64 in [0, 1): offsets that turn a fractional page count into whole ones.

        `floor(count + dither)` has the mean `count` over rows; whole counts stay as they are.
        """
        step, layer, head = _DITHER
        return (
            0.5
            + self.position.double() * step
            + self.layer.double() * layer
            + self.kv_head.clamp(min=0).double() * head
        ) % 1.0

    def _columns(self, columns: int | range) -> Tensor:
        import torch

        places = range(columns) if isinstance(columns, int) else columns
        return torch.arange(places.start, places.stop, device=self.n_pages.device)
