"""The page lists of a policy, as several analyses read them, and sums over requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from coverage_lab.analyses.needs import steady
from coverage_lab.bootstrap import ratio_interval

if TYPE_CHECKING:
    from coverage_lab.trace import Block, Trace

Result = TypeVar("Result")


@dataclass(frozen=True)
class Lists:
    """Page lists of some neighbouring layers of one request.

    Attributes
    ----------
    request : int
        Place of the request in the trace.
    layers : ndarray
        `[L]`: numbers of the layers.
    first_page : int
        Absolute number of the page of column 0. A column is the same page in all rows.
    kept : ndarray
        `[L, KV heads, steps, P]` bool: pages that the policy keeps.
    exact : ndarray
        `[L, KV heads, steps, P]` float32: exact shares.
    start, n_pages : ndarray
        `[L, KV heads, steps]`: column of the row's first page, and its pages.
    """

    request: int
    layers: np.ndarray
    first_page: int
    kept: np.ndarray
    exact: np.ndarray
    start: np.ndarray
    n_pages: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Pages kept, `[L, KV heads, steps]`."""
        return self.kept.sum(-1)


def over_blocks(trace: Trace, columns: Sequence[str], work: Callable[[Block], Result]) -> Iterator[Result]:
    """Yield what `work` makes of every block with these columns, in order; several run at a time."""
    from coverage_lab.policies.parallel import in_order

    yield from in_order(lambda span: work(span.read()), trace.spans(columns))


def over_lists(trace: Trace, policy: str, work: Callable[[Lists], Result]) -> Iterator[Result]:
    """Yield what `work` makes of a policy's lists, block by block in order; several run at a time."""
    from coverage_lab.policies.evaluate import over_lists as over
    from coverage_lab.policies.policy import parse_policy

    def of_block(block: Block, kept: np.ndarray, exact: np.ndarray) -> Result:
        grid = block.layers, block.kv_heads, block.steps
        numbers = {name: block.columns[name].reshape(grid) for name in ("layer", "n_pages")}
        first_page = block.columns["first_page"]
        kept, exact = (_aligned(each, first_page) for each in (kept, exact))
        return work(
            Lists(
                block.request,
                numbers["layer"][:, 0, 0],
                int(first_page.min()),
                kept.reshape(*grid, -1),
                exact.reshape(*grid, -1),
                (first_page - first_page.min()).reshape(grid),
                numbers["n_pages"],
            )
        )

    yield from over(trace, parse_policy(policy), of_block)


def _aligned(matrix: np.ndarray, first_page: np.ndarray) -> np.ndarray:
    """Move every row to where its first page lies: with sliding windows not all begin at page 0."""
    offset = first_page - first_page.min()
    if not offset.any():
        return matrix
    rows, width = matrix.shape
    moved = np.zeros((rows, width + int(offset.max())), matrix.dtype)
    np.put_along_axis(moved, offset[:, None] + np.arange(width), matrix, 1)
    return moved


class Tally:
    """Sums and counts of each group by request, and their means.

    Parameters
    ----------
    requests : int
    """

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._sums: dict[tuple[Any, ...], np.ndarray] = {}

    def add(self, request: int, key: tuple[Any, ...], values: np.ndarray, over: Any = None) -> None:
        """Add values to a group; what they are divided by is their number, or the sum of `over`."""
        sums = self._sums.setdefault(key, np.zeros((2, self._requests)))
        sums[0, request] += values.sum(dtype=np.float64)
        sums[1, request] += values.size if over is None else np.sum(over, dtype=np.float64)

    def mean(self, key: tuple[Any, ...]) -> float | None:
        """Return the mean of a group, None if nothing was added."""
        sums = self._sums.get(key)
        return None if sums is None or not sums[1].sum() else steady(float(sums[0].sum() / sums[1].sum()))

    def interval(self, key: tuple[Any, ...], seed: int) -> dict[str, float]:
        """Return the 95% interval over requests, `ci_low` and `ci_high`."""
        top, bottom = self._sums[key]
        low, high = ratio_interval(top[bottom > 0], bottom[bottom > 0], seed)
        return {"ci_low": steady(low), "ci_high": steady(high)}

    def count(self, key: tuple[Any, ...]) -> int:
        """Return what the values of a group are divided by."""
        return int(self._sums[key][1].sum())

    def means(self, key: tuple[Any, ...]) -> np.ndarray:
        """Return the mean of every request that has something in a group."""
        top, bottom = self._sums[key]
        means: np.ndarray = top[bottom > 0] / bottom[bottom > 0]
        return means

    def requests(self, key: tuple[Any, ...]) -> int:
        """Return how many requests have something in a group."""
        return int((self._sums[key][1] > 0).sum())

    def groups(self) -> list[tuple[Any, ...]]:
        """Return the groups, in the order in which they came."""
        return list(self._sums)
