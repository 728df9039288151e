"""What several analyses read of a trace: the pages that rows need, and means over requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from coverage_lab.bootstrap import ratio_interval
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace
from coverage_lab.trace.schema import oracle_column


def recorded_column(trace: Trace, gamma: float) -> str:
    """Return the column with the size of C*(gamma), or raise CoverageLabError if the trace has none."""
    if not 0 < gamma <= 1:
        raise CoverageLabError(f"--gamma {gamma:g} is not in (0, 1]")
    column = oracle_column(gamma)
    trace.require([column])
    return column


def needed(trace: Trace, gamma: float) -> pl.LazyFrame:
    """Return all rows with `needed`, the pages of C*(gamma), and `fraction`, that over the row's pages.

    Beside them `request_id, task, prompt_tokens, layer, kv_head, step, n_pages`.

    Raises
    ------
    CoverageLabError
        If the trace was recorded without this gamma.
    """
    column = recorded_column(trace, gamma)
    requests = trace.requests.lazy().select("request_id", "task", "prompt_tokens")
    return (
        trace.scan()
        .select(
            "request_id",
            "layer",
            "kv_head",
            "step",
            pl.col("n_pages").cast(pl.Float64),
            pl.col(column).cast(pl.Float64).alias("needed"),
        )
        .with_columns(fraction=pl.col("needed") / pl.col("n_pages"))
        .join(requests, on="request_id")
    )


def means(rows: pl.LazyFrame, by: Sequence[str], value: str, seed: int = 0) -> pl.DataFrame:
    """Return the mean of a column in every group, and its 95% interval over requests.

    Returns
    -------
    DataFrame
        The columns `by`, then `value, ci_low, ci_high, rows, requests`; sorted.
    """
    sums = (
        rows.group_by([*by, "request_id"])
        .agg(pl.col(value).sum().alias("sum"), pl.len().alias("rows"))
        .sort([*by, "request_id"])
        .collect(engine="streaming")
    )
    lines = []
    for key, part in sums.group_by(list(by), maintain_order=True):
        top, rows_of = part["sum"].to_numpy(), part["rows"].to_numpy()
        low, high = ratio_interval(top, rows_of, seed)
        lines.append(
            {
                **dict(zip(by, key, strict=True)),
                value: steady(float(top.sum() / rows_of.sum())),
                "ci_low": steady(low),
                "ci_high": steady(high),
                "rows": int(rows_of.sum()),
                "requests": len(part),
            }
        )
    return pl.DataFrame(lines, infer_schema_length=None)


def steady(value: float) -> float:
    """Return a value without its last digits: sums over rows come in no fixed order, and differ there."""
    return round(value, 10)


def quarters(values: np.ndarray) -> np.ndarray:
    """Return the edges of up to four groups of about as many values each, `[groups + 1]`, rising."""
    return np.unique(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
