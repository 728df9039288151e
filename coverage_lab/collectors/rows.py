"""Turn log masses into the rows of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from coverage_lab.kernels.select.reference import oracle_counts
from coverage_lab.pages import Rows, page_range
from coverage_lab.trace.schema import oracle_column, share_column

Record = Literal["shares", "counts", "query-heads", "tensors"]


@dataclass(frozen=True)
class RowFormat:
    """What is kept of every row.

    Parameters
    ----------
    page_size : int
        Tokens a page.
    estimators : tuple of str
        Names of the recorded estimators, `exact` first.
    gammas : tuple of float
        Coverages whose oracle counts are stored.
    record : {"shares", "counts", "query-heads", "tensors"}
        `counts` stores no shares; `query-heads` those of every query head too.
    share_dtype : {"float16", "float32"}
        Type of the stored shares; counts and scalars are computed before rounding.
    """

    page_size: int
    estimators: tuple[str, ...]
    gammas: tuple[float, ...]
    record: Record = "shares"
    share_dtype: Literal["float16", "float32"] = "float16"


def layer_rows(
    form: RowFormat,
    request_id: str,
    layer: int,
    masses: Sequence[Tensor],
    prompt_tokens: int,
    first_step: int,
    window: int | None,
) -> pl.DataFrame:
    """Return the rows of one layer, sorted by KV head and step.

    Parameters
    ----------
    form : RowFormat
    request_id : str
    layer : int
    masses : sequence of Tensor
        A tensor `[estimators, KV heads, G, pages]` of log masses for each step.
    prompt_tokens : int
        Tokens of the prompt; the query of step t sits at `prompt_tokens + t`.
    first_step : int
        Step of the first tensor.
    window : int, optional
        Sliding window of the layer in tokens.
    """
    steps, kv_heads = len(masses), masses[0].shape[1]
    width = max(mass.shape[-1] for mass in masses)
    padded = [F.pad(mass.float(), (0, width - mass.shape[-1]), value=-torch.inf) for mass in masses]
    log_mass = torch.stack(padded, dim=2)  # [estimators, KV heads, steps, G, width]
    per_head = log_mass.softmax(-1).flatten(1, 2).cpu()  # [estimators, rows, G, width]
    shares = per_head.mean(2)
    log_total = log_mass[0].logsumexp(-1).mean(-1).flatten().cpu()

    first = prompt_tokens + first_step
    positions = torch.arange(first, first + steps)
    ranges = torch.tensor([page_range(int(p), form.page_size, window) for p in positions])  # [steps, 2]
    rows = Rows(
        first_page=ranges[:, 0].repeat(kv_heads),
        n_pages=ranges[:, 1].repeat(kv_heads),
        position=positions.repeat(kv_heads),
        layer=torch.full((kv_heads * steps,), layer),
        kv_head=torch.arange(kv_heads).repeat_interleave(steps),
        page_size=form.page_size,
    )
    gammas = torch.tensor(form.gammas, dtype=torch.float64)
    oracle = oracle_counts(shares[0], rows, gammas)
    columns: dict[str, pl.Series] = {
        "layer": _series(rows.layer, pl.UInt16),
        "kv_head": _series(rows.kv_head, pl.UInt16),
        "step": _series(rows.position - prompt_tokens, pl.UInt32),
        "position": _series(rows.position, pl.UInt32),
        "n_pages": _series(rows.n_pages, pl.UInt32),
        "first_page": _series(rows.first_page, pl.UInt32),
        "log_total": _series(log_total, pl.Float32),
        "entropy": _series(torch.special.entr(shares[0]).sum(-1), pl.Float32),
    }
    for column, gamma in enumerate(form.gammas):
        columns[oracle_column(gamma)] = _series(oracle[:, column], pl.UInt32)
    if form.record != "counts":
        for index, name in enumerate(form.estimators):
            columns[share_column(name)] = _lists(shares[index], form.share_dtype)
    if form.record == "query-heads":
        for index, name in enumerate(form.estimators):
            for head in range(per_head.shape[2]):
                columns[share_column(name, head)] = _lists(per_head[index, :, head], form.share_dtype)
    frame = pl.DataFrame(columns)
    # Lists were padded to the longest step.
    return frame.select(
        pl.lit(request_id).alias("request_id"),
        pl.col("*").exclude(pl.List),
        pl.col(pl.List).list.head("n_pages"),
    )


def _series(values: Tensor, dtype: type[pl.DataType]) -> pl.Series:
    return pl.Series(values.numpy(), dtype=dtype)


def _lists(shares: Tensor, dtype: str) -> pl.Series:
    array = pl.Series(np.ascontiguousarray(shares.numpy().astype(dtype)))
    return array.arr.to_list()
