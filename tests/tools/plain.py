"""What the words of the design mean, one page and one row at a time, in plain Python and float64.

Slow, and shares no code with the package. Ties go to the lower page index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import polars as pl

# Powers of 1 / r, where r is the real root above 1 of x^4 = x + 1.
_ROOT = 1.2207440846057594
STEP, LAYER, HEAD = 1 / _ROOT, 1 / _ROOT**2, 1 / _ROOT**3


# Shares closer than this count as equal. Half of it is the most that rounding to it moves a share.
RESOLUTION = 2.0**-30


def falling(shares: Sequence[float]) -> list[int]:
    """Return the pages by falling share; ties by lower index."""

    def place(page: int) -> tuple[int, int]:
        share = shares[page]
        return -share if isinstance(share, int) else -round(share / RESOLUTION), page

    return sorted(range(len(shares)), key=place)


def oracle(shares: Sequence[float], gamma: float) -> set[int]:
    """Return C*(gamma) of Eq. 1: the fewest pages that sum to gamma of the whole."""
    exact = _exact(shares)
    need, have, kept = _needed(exact, gamma), Fraction(0), set()
    if gamma >= 1:
        return set(range(len(shares)))
    for page in falling(shares):
        if have >= need:
            break
        kept.add(page)
        have += exact[page]
    return kept or {falling(shares)[0]}


def _exact(shares: Sequence[float]) -> list[Any]:
    return [share if isinstance(share, int) else Fraction(share) for share in shares]


def _needed(exact: Sequence[Any], gamma: float) -> Fraction:
    # The product in float64: 0.4 is a hair above 2 / 5 there, and two of five equal pages are still enough.
    return Fraction(gamma * float(sum(exact)))


def forced(n_pages: int, first_page: int = 0) -> set[int]:
    """Return the pages that are always kept: the sink where the row sees it, and the current page."""
    return {n_pages - 1} | ({0} if first_page == 0 else set())


def coverage(shares: Sequence[float], gamma: float, first_page: int = 0) -> set[int]:
    """Return the set of Eq. 3: forced pages, then by falling share until gamma of the whole is reached."""
    if gamma >= 1:
        return set(range(len(shares)))
    exact = _exact(shares)
    kept = forced(len(shares), first_page)
    have, need = sum(exact[page] for page in kept), _needed(exact, gamma)
    for page in falling(shares):
        if have >= need:
            break
        if page not in kept:
            kept.add(page)
            have += exact[page]
    return kept


@dataclass(frozen=True)
class Row:
    """One row of a trace, with its shares by column name."""

    request: int
    layer: int
    kv_head: int
    step: int
    position: int
    n_pages: int
    first_page: int
    page_size: int
    shares: Mapping[str, Sequence[float]] = field(repr=False)
    recorded: Mapping[str, int] = field(repr=False)

    @property
    def place(self) -> tuple[int, int, int]:
        """Request, layer and step."""
        return self.request, self.layer, self.step

    def exact(self) -> list[float]:
        """Return the exact shares, scaled to sum to one."""
        total = math.fsum(self.shares["share"])
        return [share / total for share in self.shares["share"]]

    def tokens(self, pages: set[int]) -> int:
        """Return the tokens in some pages; the current page may be partial."""
        last = self.position % self.page_size + 1
        return sum(last if page == self.n_pages - 1 else self.page_size for page in pages)


_INTEGERS = ("layer", "kv_head", "step", "position", "n_pages", "first_page")


@cache
def rows_of(trace: Any) -> list[Row]:
    """Return every row of a trace, read with polars alone."""
    rows = []
    for request, shard in enumerate(trace.shards):
        frame = pl.read_parquet(shard.path)
        lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
        for line in frame.iter_rows(named=True):
            whole = {name: line[name] for name in _INTEGERS}
            shares = {name: line[name] for name in lists}
            recorded = {name: line[name] for name in line if name.startswith("oracle_pages_")}
            rows.append(
                Row(
                    request,
                    **whole,
                    page_size=trace.page_size,
                    shares=shares,
                    recorded=recorded,
                )
            )
    return rows


@cache
def siblings_of(trace: Any) -> dict[tuple[int, int, int], list[Row]]:
    """Return the rows of all KV heads of each request, layer and step."""
    found: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows_of(trace):
        found.setdefault(row.place, []).append(row)
    return found


def offset(row: Row, shared_list: bool) -> float:
    """Return what is added to a fractional page count before it is cut to a whole one."""
    head = 0 if shared_list else row.kv_head
    return (0.5 + row.position * STEP + row.layer * LAYER + head * HEAD) % 1


def whole(count: float, row: Row, shared_list: bool) -> int:
    """Return a fractional page count as a whole one, between the forced pages and all pages."""
    count = math.floor(count + offset(row, shared_list))
    return min(max(count, len(forced(row.n_pages, row.first_page))), row.n_pages)


def first_of(shares: Sequence[float], count: int, row: Row) -> set[int]:
    """Return the forced pages and the pages with the largest shares, `count` in all."""
    kept = forced(row.n_pages, row.first_page)
    for page in falling(shares):
        if len(kept) >= count:
            break
        kept.add(page)
    return kept


def choose(budget: Any, shares: Sequence[float], row: Row, shared_list: bool = False) -> set[int]:
    """Return the pages that a budget keeps of shares."""
    if budget.name == "coverage":
        return coverage(shares, budget.gamma, row.first_page)
    if budget.name == "fixed":
        pages = budget.pages if budget.tokens is None else math.ceil(budget.tokens / row.page_size)
        return first_of(shares, whole(pages, row, shared_list), row)
    if budget.name == "proportional":
        return first_of(shares, whole(budget.fraction * row.n_pages, row, shared_list), row)
    if budget.name == "profiled":
        counts = budget.table.counts[row.layer]
        of_group = sum(counts) / len(counts) if shared_list else counts[row.kv_head % len(counts)]
        count = of_group * budget.scale
        return first_of(shares, whole(count, row, shared_list), row)
    if budget.name == "threshold":
        above = {page for page in range(row.n_pages) if shares[page] >= budget.share}
        return above | forced(row.n_pages, row.first_page)
    if budget.name == "window":
        sink = {page for page in range(row.n_pages) if page + row.first_page < budget.sink}
        latest = math.floor(budget.local + offset(row, shared_list))
        local = {page for page in range(row.n_pages) if page >= row.n_pages - latest}
        return sink | local | forced(row.n_pages, row.first_page)
    if budget.name == "delta":
        sink = {page for page in range(row.n_pages) if page + row.first_page < budget.sink}
        local = {page for page in range(row.n_pages) if page >= row.n_pages - budget.local}
        units = [s if isinstance(s, int) else round(s / RESOLUTION) for s in shares]
        least = max(1, *(units[page] for page in sink | local)) / math.exp(min(700, budget.delta))
        close = {page for page in range(row.n_pages) if budget.delta == math.inf or units[page] >= least}
        return sink | local | close
    raise NotImplementedError(budget.name)


def keep(policy: Any, row: Row, siblings: Sequence[Row], group: int) -> set[int]:
    """Return the pages that a row reads under a policy.

    `siblings` are the rows of all KV heads of the same request, layer and step, `group` the query heads a
    KV head.
    """
    if row.layer in policy.dense_layers:
        return set(range(row.n_pages))
    name = policy.estimator.name
    column = "share" if name == "exact" else f"share_{name}"
    if policy.granularity == "query_head":
        lists = [choose(policy.budget, row.shares[f"{column}_q{head}"], row) for head in range(group)]
        return set().union(*lists)
    if policy.granularity == "layer":
        columns = zip(*(sibling.shares[column] for sibling in siblings), strict=True)
        return choose(policy.budget, [math.fsum(page) / len(page) for page in columns], row, True)
    return choose(policy.budget, row.shares[column], row)


def evaluate(trace: Any, policy: Any, target: float) -> list[dict[str, Any]]:
    """Return for every row what a policy keeps of it, and what the oracle needs."""
    rows = rows_of(trace)
    siblings = siblings_of(trace)
    group = trace.geometry["query_heads"] // trace.geometry["kv_heads"]
    results = []
    for row in rows:
        kept = keep(policy, row, siblings[row.place], group)
        exact = row.exact()
        # Counts were recorded before the shares were rounded.
        needed = row.recorded.get(f"oracle_pages_{target:g}", len(oracle(exact, target)))
        best = set(falling(exact)[:needed])
        covered = math.fsum(exact[page] for page in kept)
        results.append(
            {
                "row": row,
                "kept": len(kept),
                "kept_tokens": row.tokens(kept),
                "coverage": covered,
                "covered": covered >= target - 1e-6,
                "pages": row.n_pages,
                "tokens": row.tokens(set(range(row.n_pages))),
                "oracle_pages": len(best),
                "oracle_tokens": row.tokens(best),
            }
        )
    return results
