"""Compare budgets at the same guarantee, or at the same reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from coverage_lab.bootstrap import interval, ratio_interval, resample_weights
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.budgets import budgets, significant
from coverage_lab.policies.budgets.coverage import Coverage
from coverage_lab.policies.budgets.profiled import Profile, Profiled
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.evaluate import Evaluation, PoliciesOf, evaluate, needed_columns
from coverage_lab.policies.fit import GroupCounts, group_counts
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.trace import Trace

# Every pass of a search over the trace tries this many levels of every policy at once.
LEVELS = 33
FOLDS = 2
# Up to this level a profile holds a quantile of the need; above it, a multiple of the largest.
QUANTILES = 0.9
READS_TOLERANCE = 0.002

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Family:
    """Policies that differ in how much they read.

    Attributes
    ----------
    at : callable
        From a level in [0, 1] and a part of the requests to the policy; reads rise with the level.
    note : str
        What the text of the policy does not say.
    """

    at: Callable[[float, int], Policy]
    note: str = ""


def compare(
    trace: Trace,
    target_coverage: float = 0.95,
    target_rows: float = 0.9,
    anchor: str | None = None,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Return both tables, `same_guarantee` and `same_reads`, as records.

    Parameters
    ----------
    trace : Trace
    target_coverage : float
        Exact mass that a row should keep.
    target_rows : float
        Fraction of all rows that should keep it (same guarantee).
    anchor : str, optional
        Policy whose reads the others are matched to (same reads); `mvar/coverage:0.98` by default, or the
        same of another estimate where mvar was not recorded.
    seed : int
        Seed of the bootstrap.
    progress : callable
        Told what is done, and how many of how many passes over requests.

    Returns
    -------
    list of dict
        See `record`.
    """
    _anchor(trace, anchor)  # before any work
    return [
        *same_guarantee(trace, target_coverage, target_rows, seed, progress),
        *same_reads(trace, anchor, target_coverage, seed, progress),
    ]


def _anchor(trace: Trace, text: str | None) -> Policy:
    if text is None:
        estimator = "mvar" if "mvar" in trace.estimators else (trace.estimators or ["exact"])[-1]
        text = f"{estimator}/coverage:0.98"
    policy = parse_policy(text)
    trace.require(needed_columns([policy], trace))
    return policy


def same_guarantee(
    trace: Trace,
    target_coverage: float = 0.95,
    target_rows: float = 0.9,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
    names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Size every budget so that `target_rows` of the rows keep `target_coverage` (paper, Fig. 1b).

    The profile of a group of rows holds a quantile of the pages its rows need, measured on the other
    half of the requests, or where the largest need is not enough, a multiple of that. Intervals size the
    budget anew in every resample. `names` are the estimators, by default all that were recorded.
    """
    _check_fraction("target coverage", target_coverage)
    _check_fraction("target rows", target_rows)
    names = trace.estimators if names is None else names
    pace = _Pace(trace, "same guarantee", 5, progress)
    needs = group_counts(
        trace,
        [Policy(estimator=estimators.get(name)(), budget=Coverage()) for name in names],
        FOLDS,
        target_coverage,
        pace.step,
    )
    families = _families(trace, names, lambda estimator, by: _quantile_family(estimator, by, needs))

    tried: list[_Tried] = []
    brackets = np.tile([0.0, 1.0], (len(families), 1))
    for number in range(3):
        tried.append(_try_levels(trace, families, brackets, target_coverage, pace))
        result, grid = tried[-1].result, tried[-1].levels
        met = (result.covered.sum(0) / result.rows.sum() >= target_rows).reshape(len(families), LEVELS)
        met[:, -1] = True  # the top level reads all it can
        first = met.argmax(1)
        # After the first pass a margin stays: resampling the requests moves the level.
        margin = 2 if number == 0 else 1
        low, high = np.maximum(first - margin, 0), np.minimum(first + margin - 1, LEVELS - 1)
        places = np.arange(len(families))
        brackets = np.stack([grid[places, low], grid[places, high]], 1)
    chosen = brackets[:, 1]
    final = evaluate(trace, _policies(families, chosen), target_coverage, progress=pace.step)
    records = []
    for index, family in enumerate(families):
        policy = family.at(float(chosen[index]), 0)
        low_high = _resized_interval(tried[:2], index, target_rows, seed)
        headline = ("tokens_over_oracle", low_high)
        line = record("same_guarantee", policy, final, index, trace, seed, headline, family.note)
        if isinstance(policy.budget, Profiled):
            line["requested"] = round(_quantile(float(chosen[index])), 4)
            if policy.budget.scale > 1:
                line["requested"] = policy.budget.scale
                line["note"] = _joined(line["note"], "more than the largest need of the other half")
        records.append(line)
    return records


def same_reads(
    trace: Trace,
    anchor: str | None = None,
    target_coverage: float = 0.95,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Match every budget to the reads of the anchor, then see what it keeps (paper, 5.5.2).

    A profile holds the mean pages that the coverage rule of the anchor keeps, measured on the other
    half of the requests and scaled to the same reads.
    """
    _check_fraction("target coverage", target_coverage)
    reference = _anchor(trace, anchor)
    pace = _Pace(trace, "same reads", 6, progress)
    families, chosen, reads = _matched(trace, reference, trace.estimators, target_coverage, pace)
    policies = _policies(families, chosen)
    final = evaluate(
        trace, lambda request: [reference, *policies(request)], target_coverage, progress=pace.step
    )
    records = [record("same_reads", reference, final, 0, trace, seed, note="anchor")]
    for index, family in enumerate(families):
        policy = family.at(float(chosen[index]), 0)
        line = record("same_reads", policy, final, index + 1, trace, seed, note=family.note, anchor=0)
        if abs(line["reads"] / reads - 1) > READS_TOLERANCE:
            line["note"] = _joined(line["note"], "reads could not be matched")
        if not _same_rule(policy, reference):
            records.append(line)
    return records


def matched(
    trace: Trace,
    anchor: str | None = None,
    names: Collection[str] | None = None,
    progress: Progress = lambda what, done, total: None,
    reads: float | None = None,
) -> PoliciesOf:
    """Return policies that read as much as an anchor, from the place of a request to what it is to run under.

    The anchor comes first, then every other budget (or those of some names) on its estimate; profiles are
    those of the other half of the requests, as in `same_reads`. `reads`, pages kept over pages seen, takes
    the place of the anchor's own on the trace.
    """
    reference = _anchor(trace, anchor)
    pace = _Pace(trace, "same reads", 5, progress)
    families, chosen, _ = _matched(trace, reference, [reference.estimator.name], 1.0, pace, names, reads)
    others = [
        place
        for place, (family, level) in enumerate(zip(families, chosen, strict=True))
        if not _same_rule(family.at(float(level), 0), reference)
    ]
    policies = _policies([families[place] for place in others], chosen[others])
    return lambda request: [reference, *policies(request)]


def _matched(
    trace: Trace,
    reference: Policy,
    estimators_: Sequence[str],
    target: float,
    pace: _Pace,
    names: Collection[str] | None = None,
    reads: float | None = None,
) -> tuple[list[Family], np.ndarray, float]:
    """Return every budget on some estimates, the levels that read as much as `reference`, and these reads."""
    start = evaluate(trace, [reference], target, realised=False, progress=pace.step)
    reads = float(start.kept.sum() / start.pages.sum()) if reads is None else reads
    fitted = group_counts(
        trace,
        [replace(reference, estimator=estimators.get(name)(), granularity="kv_head") for name in estimators_],
        FOLDS,
        progress=pace.step,
    )
    families = [
        _with_dense_layers(family, reference.dense_layers)
        for family in _families(
            trace, estimators_, lambda estimator, by: _scaled_family(estimator, by, fitted), names
        )
    ]
    brackets = np.tile([0.0, 1.0], (len(families), 1))
    for _ in range(3):
        passed = _try_levels(trace, families, brackets, target, pace)
        grid, result = passed.levels, passed.result
        got = (result.kept.sum(0) / result.pages.sum()).reshape(len(families), LEVELS)
        best = np.abs(got - reads).argmin(1)
        above = np.minimum((got < reads).sum(1), LEVELS - 1)
        places = np.arange(len(families))
        chosen = grid[places, best]
        brackets = np.stack([grid[places, np.maximum(above - 1, 0)], grid[places, above]], 1)
    return families, chosen, reads


def given(
    trace: Trace,
    policies: Sequence[str],
    target_coverage: float = 0.95,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Evaluate policies as they are."""
    _check_fraction("target coverage", target_coverage)
    parsed = [parse_policy(text) for text in policies]
    pace = _Pace(trace, "policies", 1, progress)
    result = evaluate(trace, parsed, target_coverage, progress=pace.step)
    return [record("given", policy, result, index, trace, seed) for index, policy in enumerate(parsed)]


def record(
    table: str,
    policy: Policy,
    result: Evaluation,
    index: int,
    trace: Trace,
    seed: int = 0,
    headline: tuple[str, tuple[float, float]] | None = None,
    note: str = "",
    anchor: int | None = None,
) -> dict[str, Any]:
    """Return one line of a table.

    Keys: `table`, `policy` (canonical text), `requested` (the budget's own number), `reads` (kept pages over
    all pages), `reads_metadata` (bytes of the estimate over the bytes of the cache), `pages_over_oracle`,
    `tokens_over_oracle`, `coverage_mean`, `coverage_p5`, `coverage_p1`, `rows_below_target`, `ci_low` and
    `ci_high` (bootstrap 95% interval over requests of the column `ci_of`), `below_vs_anchor` (rows below
    target, less those of the policy at place `anchor`) with `vs_anchor_low` and `vs_anchor_high` (paired
    interval: both policies on the same requests of every resample; None without an anchor), `rows`,
    `requests`, `note`.
    """
    rows = result.rows.sum()
    below = result.rows - result.covered[:, index]
    ci_of, (low, high) = headline or ("rows_below_target", ratio_interval(below, result.rows, seed))
    against: dict[str, float | None] = dict.fromkeys(("below_vs_anchor", "vs_anchor_low", "vs_anchor_high"))
    if anchor is not None:
        more = result.covered[:, anchor] - result.covered[:, index]
        ends = ratio_interval(more, result.rows, seed)
        against = dict(zip(against, (float(more.sum() / rows), *ends), strict=True))
    return {
        "table": table,
        "policy": str(policy),
        "requested": policy.budget.requested(),
        "reads": float(result.kept[:, index].sum() / result.pages.sum()),
        "reads_metadata": metadata_reads(policy, trace),
        "pages_over_oracle": float(result.kept[:, index].sum() / result.oracle_pages.sum()),
        "tokens_over_oracle": float(result.kept_tokens[:, index].sum() / result.oracle_tokens.sum()),
        "coverage_mean": float(result.coverage[:, index].sum() / rows),
        "coverage_p5": result.coverage_quantile(index, 0.05),
        "coverage_p1": result.coverage_quantile(index, 0.01),
        "rows_below_target": float(below.sum() / rows),
        "ci_low": low,
        "ci_high": high,
        "ci_of": ci_of,
        **against,
        "rows": int(rows),
        "requests": len(result.rows),
        "note": note,
    }


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def metadata_reads(policy: Policy, trace: Trace) -> float:
    """Return what the estimates of a policy read, over the bytes of all keys and values."""
    if not policy.budget.reads_shares:
        return 0.0
    head_dim = int(trace.geometry["head_dim"])
    values = policy.estimator.metadata_values(head_dim, trace.page_size)
    layers = [layer["layer"] for layer in trace.geometry["layers"]]
    estimated = sum(layer not in policy.dense_layers for layer in layers) / len(layers)
    return estimated * values / (2 * trace.page_size * head_dim)


def _check_fraction(what: str, value: float) -> None:
    if not 0 < value <= 1:
        raise CoverageLabError(f"{what} {value} is not in (0, 1]")


By = Literal["layer", "kv_head"]


def _families(
    trace: Trace,
    estimators_: Sequence[str],
    profiled: Callable[[str, By], Family],
    names: Collection[str] | None = None,
) -> list[Family]:
    """Every registered budget, or those of some names, on some estimators; profiles if there are halves."""
    if not trace.estimators:
        trace.require(["share"])
    families = []
    for estimator in estimators_:
        for name in budgets.names():
            kind = budgets.get(name)
            if names is not None and name not in names:
                continue
            if kind is Profiled:
                if len(trace.shards) >= FOLDS:
                    families += [profiled(estimator, by) for by in ("layer", "kv_head")]
            elif kind.reads_shares or estimator == estimators_[0]:
                families.append(_budget_family(estimator, name, trace.max_pages))
    return families


def _budget_family(estimator: str, budget: str, max_pages: int) -> Family:
    def at(level: float, fold: int) -> Policy:
        return Policy(
            estimator=estimators.get(estimator)(), budget=budgets.get(budget)().at(level, max_pages)
        )

    return Family(at)


def _with_dense_layers(family: Family, layers: tuple[int, ...]) -> Family:
    return replace(family, at=lambda level, fold: replace(family.at(level, fold), dense_layers=layers))


def _same_rule(one: Policy, other: Policy) -> bool:
    """Whether two policies differ in nothing but how much they read."""
    return (one.estimator, type(one.budget), one.granularity) == (
        other.estimator,
        type(other.budget),
        other.granularity,
    ) and not isinstance(one.budget, Profiled)


def _quantile_family(estimator: str, by: By, needs: dict[Policy, list[GroupCounts]]) -> Family:
    parts = _of_estimator(estimator, needs)

    def at(level: float, fold: int) -> Policy:
        table = parts[(fold + 1) % FOLDS].quantile(_quantile(level), by)
        beyond = max(0.0, level - QUANTILES) / (1 - QUANTILES)
        scale = significant(1 / max(1e-9, 1 - beyond))
        return Policy(estimator=estimators.get(estimator)(), budget=_named(table, scale))

    return Family(at, "quantile of the need, fitted on the other half")


def _quantile(level: float) -> float:
    return min(1.0, level / QUANTILES)


def _scaled_family(estimator: str, by: By, fitted: dict[Policy, list[GroupCounts]]) -> Family:
    tables = [part.mean(by) for part in _of_estimator(estimator, fitted)]

    def at(level: float, fold: int) -> Policy:
        budget = Profiled(table=tables[(fold + 1) % FOLDS]).at(level, 0)
        return Policy(
            estimator=estimators.get(estimator)(), budget=_named(tables[(fold + 1) % FOLDS], budget.scale)
        )

    return Family(at, "mean counts of the anchor's rule, fitted on the other half")


def _named(table: Profile, scale: float) -> Profiled:
    return Profiled(profile=f"per-{table.by}", scale=scale, table=table)


def _of_estimator(estimator: str, counts: dict[Policy, list[GroupCounts]]) -> list[GroupCounts]:
    return next(parts for policy, parts in counts.items() if policy.estimator.name == estimator)


def _policies(families: Sequence[Family], levels: np.ndarray) -> Callable[[int], list[Policy]]:
    """From the place of a request to the policies of its part, made once a part."""
    parts = [
        [family.at(float(level), fold) for family, level in zip(families, levels, strict=True)]
        for fold in range(FOLDS)
    ]
    return lambda request: parts[request % FOLDS]


@dataclass(frozen=True)
class _Tried:
    """One pass of a search: `levels` is `[families, LEVELS]`, `result` has a policy for each cell."""

    levels: np.ndarray
    result: Evaluation

    def of(self, family: int, sums: str) -> np.ndarray:
        """`[requests, LEVELS]` of one family."""
        values: np.ndarray = getattr(self.result, sums)[:, family * LEVELS : (family + 1) * LEVELS]
        return values


def _try_levels(
    trace: Trace, families: Sequence[Family], brackets: np.ndarray, target: float, pace: _Pace
) -> _Tried:
    grid = np.linspace(brackets[:, 0], brackets[:, 1], LEVELS, axis=1)  # [families, LEVELS]
    repeated = [family for family in families for _ in range(LEVELS)]
    result = evaluate(trace, _policies(repeated, grid.ravel()), target, realised=False, progress=pace.step)
    return _Tried(grid, result)


def _resized_interval(
    tried: Sequence[_Tried], family: int, target_rows: float, seed: int
) -> tuple[float, float]:
    """Interval of tokens over oracle tokens, the budget sized anew in every resample of the requests."""
    first_pass = tried[0].result
    if len(first_pass.rows) < 2:
        return float("nan"), float("nan")
    order = np.concatenate([part.levels[family] for part in tried]).argsort(kind="stable")
    covered, tokens = (
        np.concatenate([part.of(family, sums) for part in tried], 1)[:, order]
        for sums in ("covered", "kept_tokens")
    )
    weights = resample_weights(len(first_pass.rows), seed)
    share = (weights @ covered) / (weights @ first_pass.rows)[:, None]
    ratio = (weights @ tokens) / (weights @ first_pass.oracle_tokens)[:, None]
    met = share >= target_rows
    met[:, -1] = True
    first = met.argmax(1)
    before = np.maximum(first - 1, 0)
    draws = np.arange(len(weights))
    # Between two levels the ratio is taken where the line through their shares meets the target.
    gap = share[draws, first] - share[draws, before]
    part = np.where(gap > 0, (target_rows - share[draws, before]) / np.where(gap > 0, gap, 1), 1.0).clip(0, 1)
    return interval(ratio[draws, before] + part * (ratio[draws, first] - ratio[draws, before]))


class _Pace:
    """Turns requests done in a pass into passes over requests done in all."""

    def __init__(self, trace: Trace, what: str, passes: int, progress: Progress) -> None:
        self._what, self._progress = what, progress
        self._done, self._total = 0, passes * len(trace.shards)

    def step(self, request: int) -> None:
        self._done += 1
        self._progress(self._what, self._done, self._total)
