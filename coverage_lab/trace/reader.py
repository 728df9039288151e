"""Read a trace, whole as a lazy frame or block by block as padded arrays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import schema

# Elements of one padded matrix; keeps a block and what is made of it within some tens of megabytes.
BLOCK_ELEMENTS = 1 << 18

_GEOMETRY = ("layer", "kv_head", "step", "position", "n_pages", "first_page")


@dataclass(frozen=True)
class Shard:
    """The rows of one request."""

    request_id: str
    path: Path
    rows: int
    max_pages: int
    sha256: str


@dataclass(frozen=True)
class Block:
    """All rows of some neighbouring layers of one request, sorted by layer, KV head and step.

    Attributes
    ----------
    request : int
        Place of the request among those that have rows.
    layers, kv_heads, steps : int
        The block has `layers * kv_heads * steps` rows.
    columns : dict of str to ndarray
        Integer columns `[rows]` int64 under their names, list columns `[rows, width]` float32, padded
        with zeros.
    """

    request: int
    layers: int
    kv_heads: int
    steps: int
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Span:
    """Where a block lies; reading it is left to whoever works on it.

    Attributes
    ----------
    request : int
        Place of the request among those that have rows.
    read : callable
        Returns the block.
    """

    request: int
    read: Callable[[], Block]


class Trace:
    """A finished trace.

    Parameters
    ----------
    path : path-like
        The directory that `collect` wrote.

    Raises
    ------
    CoverageLabError
        If there is no finished trace, its schema is newer, or a file of it is missing or truncated.
        Altered files are found when they are read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self._intact: set[Path] = set()
        self._steps: int | None = None
        for file in self.manifest["files"]:
            full = self.path / file["path"]
            if not full.is_file():
                raise CoverageLabError(
                    f"{full} is missing; restore it, or run the same collect command again"
                )
            if full.stat().st_size != file["bytes"]:
                raise CoverageLabError(
                    f"{full} has {full.stat().st_size} bytes, not {file['bytes']}; "
                    "restore it, or run the same collect command again"
                )

        self._check_page_size()

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.manifest["run"]["page_size"])

    @property
    def gammas(self) -> list[float]:
        """Coverages whose oracle counts were recorded."""
        return list(self.manifest["run"]["gammas"])

    @property
    def estimators(self) -> list[str]:
        """Estimators whose shares were recorded; empty when only counts were."""
        return [] if self.manifest["run"]["record"] == "counts" else list(self.manifest["run"]["estimators"])

    @property
    def geometry(self) -> dict[str, Any]:
        """What the manifest says of the model: layers, heads, KV heads, head_dim."""
        return dict(self.manifest["geometry"])

    @cached_property
    def requests(self) -> pl.DataFrame:
        """The requests table."""
        path = self.path / schema.REQUESTS
        self._verify(path, next(f["sha256"] for f in self.manifest["files"] if f["path"] == schema.REQUESTS))
        return pl.read_parquet(path)

    @cached_property
    def shards(self) -> list[Shard]:
        """The row files, in the order of the requests; failed and empty requests have none."""
        found = [
            Shard(Path(f["path"]).stem, self.path / f["path"], f["rows"], f["max_pages"], f["sha256"])
            for f in self.manifest["files"]
            if f["path"].startswith(f"{schema.ROWS}/")
        ]
        if not found:
            raise CoverageLabError(f"{self.path} has no rows: no request was recorded; see {schema.REQUESTS}")
        return found

    def only(self, request_ids: Collection[str], steps: int | None = None) -> Trace:
        """Return the trace of some requests alone, in the order of the whole, and of their first steps.

        The requests table and the shards stay those of all steps.
        """
        part = copy(self)
        part._steps = self._steps if steps is None else steps
        part.shards = [shard for shard in self.shards if shard.request_id in request_ids]
        part.requests = self.requests.filter(pl.col("request_id").is_in(list(request_ids)))
        part.__dict__.pop("max_pages", None)
        return part

    @cached_property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return max(shard.max_pages for shard in self.shards)

    def verify(self) -> None:
        """Raise CoverageLabError if a file differs from the sha256 in the manifest, naming it."""
        for file in self.manifest["files"]:
            self._verify(self.path / file["path"], file["sha256"])

    def scan(self) -> pl.LazyFrame:
        """Return all rows as a lazy frame, files checked."""
        for shard in self.shards:
            self._verify(shard.path, shard.sha256)
        return self._first_steps(pl.scan_parquet([shard.path for shard in self.shards]))

    def frames(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield some columns of the rows, request after request, files checked."""
        self.require(columns)
        for shard in self.shards:
            self._verify(shard.path, shard.sha256)
            yield self._first_steps(pl.scan_parquet(shard.path)).select(columns).collect()

    def require(self, columns: Sequence[str]) -> None:
        """Raise CoverageLabError if a column is missing, naming the option of `collect` that records it."""
        held = set(pl.read_parquet_schema(self.shards[0].path))
        for column in columns:
            if column in held:
                continue
            if column.startswith("oracle_pages_"):
                way = f"--gammas {column.removeprefix('oracle_pages_')}"
            elif self.manifest["run"]["record"] == "counts":
                way = "--record shares"
            elif re.search(r"_q\d+$", column):
                way = "--record query-heads"
            else:
                way = f"--estimators {','.join([*self.estimators, column.removeprefix('share_')])}"
            raise CoverageLabError(f"{self.path} has no column {column!r}; collect it with {way}")

    def blocks(self, columns: Sequence[str], elements: int = BLOCK_ELEMENTS) -> Iterator[Block]:
        """Yield the rows in blocks of whole layers, request after request; see `spans`."""
        for span in self.spans(columns, elements):
            yield span.read()

    def spans(self, columns: Sequence[str], elements: int = BLOCK_ELEMENTS) -> Iterator[Span]:
        """Yield where the blocks lie.

        Parameters
        ----------
        columns : sequence of str
            List and scalar columns wanted beside the geometry.
        elements : int
            Most elements of a padded matrix, unless one layer has more.
        """
        self.require(columns)
        layers = len(self.geometry["layers"])
        for request, shard in enumerate(self.shards):
            together = max(1, elements // (shard.rows // layers * shard.max_pages))
            for first in range(0, layers, together):
                part = range(first, min(first + together, layers))
                yield Span(request, partial(self._read, request, part, columns))

    def _read(self, request: int, part: range, columns: Sequence[str]) -> Block:
        shard = self.shards[request]
        layers, kv_heads = len(self.geometry["layers"]), int(self.geometry["kv_heads"])
        self._verify(shard.path, shard.sha256)
        a_layer = shard.rows // layers
        wanted = [*_GEOMETRY, *(column for column in columns if column not in _GEOMETRY)]
        if len(part) == layers and self._steps is None:
            frame = pl.read_parquet(shard.path, columns=wanted)
        else:
            rows = pl.scan_parquet(shard.path).slice(part.start * a_layer, len(part) * a_layer)
            frame = self._first_steps(rows).select(wanted).collect()
        return Block(request, len(part), kv_heads, len(frame) // (len(part) * kv_heads), _arrays(frame))

    def _first_steps(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        return rows if self._steps is None else rows.filter(pl.col("step") < self._steps)

    def _check_page_size(self) -> None:
        """Raise CoverageLabError if the rows have pages of another size than the manifest says."""
        files = [f for f in self.manifest["files"] if f["path"].startswith(f"{schema.ROWS}/")]
        if not files:
            return
        longest = self.path / max(files, key=lambda file: file["max_pages"])["path"]
        pages = pl.col("position") // self.page_size - pl.col("first_page") + 1
        try:
            alike = pl.scan_parquet(longest).select((pages == pl.col("n_pages")).all()).collect().item()
        except (pl.exceptions.PolarsError, OSError):  # altered, which is found when it is read
            return
        if not alike:
            raise CoverageLabError(
                f"{self.path / schema.MANIFEST} says pages of {self.page_size} tokens, and the rows have "
                "others; restore it"
            )

    def _verify(self, path: Path, sha256: str) -> None:
        if path in self._intact:
            return
        if schema.file_sha256(path) != sha256:
            raise CoverageLabError(
                f"{path} was altered (its sha256 differs); restore it, or run the same collect command again"
            )
        self._intact.add(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        what = "it is a file" if path.exists() else "no such directory"
        raise CoverageLabError(f"no trace at {path}: {what}; make one with coverage-lab collect")
    try:
        manifest = json.loads((path / schema.MANIFEST).read_bytes())
    except FileNotFoundError:
        if (path / schema.RUN).exists():
            done = len(list((path / schema.JOURNAL).glob("*.json")))
            raise CoverageLabError(
                f"the trace {path} is unfinished (requests done: {done}); "
                "run the collect command it was begun with again"
            ) from None
        what = f"it has no {schema.MANIFEST}"
        if (path / schema.ROWS).is_dir():
            what += "; restore it, or collect into another directory"
        raise CoverageLabError(f"{path} is no trace: {what}") from None
    except ValueError as error:
        raise CoverageLabError(f"{path / schema.MANIFEST} is no valid JSON ({error}); restore it") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != schema.SCHEMA:
        raise CoverageLabError(f"{path} is no coverage-lab trace")
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version > schema.VERSION:
        raise CoverageLabError(
            f"{path} has trace schema {version}; this coverage-lab reads up to {schema.VERSION}: upgrade it"
        )
    for part in ("run", "geometry", "files"):
        if part not in manifest:
            raise CoverageLabError(f"{path / schema.MANIFEST} has no {part!r}; restore it")
    size = manifest["run"].get("page_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CoverageLabError(
            f"{path / schema.MANIFEST} says {size!r} for 'page_size', no number of tokens; restore it"
        )
    return manifest


def _arrays(frame: pl.DataFrame) -> dict[str, np.ndarray]:
    n_pages = frame["n_pages"].to_numpy()
    width = int(n_pages.max())
    valid = np.arange(width) < n_pages[:, None]
    arrays: dict[str, np.ndarray] = {}
    for series in frame.select(pl.col("*").exclude(pl.List)):
        arrays[series.name] = series.to_numpy().astype(np.int64 if series.dtype.is_integer() else np.float64)
    # The lists of a row all have its number of pages, so they unfold together.
    for series in frame.select(pl.col(pl.List).explode().cast(pl.Float32)):
        arrays[series.name] = np.zeros((len(n_pages), width), np.float32)
        arrays[series.name][valid] = series.to_numpy()
    return arrays
