"""One count for each layer, or each KV head, measured beforehand."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import Ranking
from coverage_lab.pages import Rows
from coverage_lab.policies.budgets import Budget, register, significant, whole_counts


@dataclass(frozen=True)
class Profile:
    """Page counts per group of rows.

    Parameters
    ----------
    by : {"layer", "kv_head"}
        What shares a count: all rows of a layer, or of one KV head of a layer.
    counts : tuple of tuple of float
        Pages for `[layer][KV head]`; one entry a layer where `by` is "layer". Layers that were not
        measured have an empty entry.
    fitted_on : dict
        Where the counts come from; `page_size`, where given, is that of every trace they are used on.
    """

    by: Literal["layer", "kv_head"]
    counts: tuple[tuple[float, ...], ...]
    fitted_on: dict[str, Any] = field(default_factory=dict, compare=False)

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON."""
        record = {
            "kind": "coverage-lab profile",
            "by": self.by,
            "counts": self.counts,
            "fitted_on": self.fitted_on,
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a profile, or raise CoverageLabError if there is none or it is malformed."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            name, way = os.fspath(path), "coverage-lab fit-profile makes one"
            if name in ("per-layer", "per-kv_head"):
                way = f"in comparisons it stands for two, each fitted on one half of the requests; {way}"
            raise CoverageLabError(f"no profile {name!r}; {way}") from None
        except ValueError:
            raise CoverageLabError(f"profile {os.fspath(path)!r} is no JSON") from None
        except OSError as error:
            raise CoverageLabError(f"profile {os.fspath(path)!r} can't be read: {error}") from None
        try:
            by = record["by"]
            counts = tuple(tuple(float(count) for count in layer) for layer in record["counts"])
            fitted_on = dict(record.get("fitted_on", {}))
        except (KeyError, TypeError, ValueError):
            by, counts, fitted_on = None, (), {}
        if by not in ("layer", "kv_head") or not any(counts):
            raise CoverageLabError(
                f"profile {os.fspath(path)!r} is no coverage-lab profile: it needs `by` and `counts`"
            )
        return cls(by, counts, fitted_on)

    @cached_property
    def table(self) -> Tensor:
        """Counts as `[layers, KV heads]` float64; NaN where nothing was measured."""
        width = max(len(layer) for layer in self.counts)
        rows = [
            list(layer) if self.by == "kv_head" else [layer[0] if layer else float("nan")] * width
            for layer in self.counts
        ]
        return torch.tensor([row + [float("nan")] * (width - len(row)) for row in rows], dtype=torch.float64)


@register("profiled")
@dataclass(frozen=True, kw_only=True)
class Profiled(Budget):
    """Keep a count that was profiled for the row's layer or KV head, the same at every step.

    Parameters
    ----------
    profile : str
        Path of a saved profile.
    scale : float
        Factor on all counts.
    table : Profile, optional
        The profile itself, in place of a path.
    """

    title = "profiled count"
    source = "paper, 5.5.2"
    primary = "profile"

    profile: str = ""
    scale: float = 1.0
    table: Profile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise CoverageLabError(f"profiled: scale {self.scale} is not a positive number")
        if self.profile and self.table is None:
            object.__setattr__(self, "table", Profile.load(self.profile))

    def requested(self) -> float | None:
        return self.scale

    @classmethod
    def counts(cls, ranking: Ranking, budgets: Sequence[Self]) -> Tensor:
        wanted = torch.stack([budget._wanted(ranking.rows) for budget in budgets], 1)
        # A group that was never measured is read whole.
        return whole_counts(wanted.where(wanted.isfinite(), ranking.rows.n_pages[:, None]), ranking)

    def _wanted(self, rows: Rows) -> Tensor:
        """`[rows]` float64, NaN where nothing was measured."""
        if self.table is None:
            raise CoverageLabError("profiled: no profile; write profiled:FILE.json")
        size = self.table.fitted_on.get("page_size", rows.page_size)
        if size != rows.page_size:
            raise CoverageLabError(
                f"profiled: the profile counts pages of {size} tokens, and here they have {rows.page_size}; "
                "fit it on a trace with the same --page-size"
            )
        table = self.table.table.to(rows.layer.device)
        if int(rows.layer.max()) >= table.shape[0] or (
            self.table.by == "kv_head" and int(rows.kv_head.max()) >= table.shape[1]
        ):
            raise CoverageLabError(
                f"profiled: the profile has {table.shape[0]} layers of {table.shape[1]} KV heads, fewer than "
                "here; fit it on a trace of the same model"
            )
        if self.table.by == "layer":
            return table[rows.layer, 0] * self.scale
        # Place -1 is the last one: the mean of the layer's heads, for a list that all of them share.
        table = torch.cat([table, table.nanmean(1, keepdim=True)], 1)
        return table[rows.layer, rows.kv_head] * self.scale

    def at(self, level: float, max_pages: int) -> Self:
        scale = significant(min(1e9, max(1e-9, level / max(1e-12, 1 - level))))
        return type(self)(profile=self.profile, scale=scale, table=self.table)
