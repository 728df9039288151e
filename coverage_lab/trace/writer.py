"""Write a trace so that a killed run loses at most the requests it was working on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import schema

# A row group holds whole layers, so that statistics prune a query for a layer, and up to this many shares:
# smaller groups take longer to read than they spare.
GROUP_SHARES = 1 << 16

REQUEST_SCHEMA: dict[str, Any] = {
    "request_id": pl.String,
    "dataset": pl.String,
    "task": pl.String,
    "prompt_tokens": pl.UInt32,
    "dropped_tokens": pl.UInt32,
    "steps": pl.UInt32,
    "decode_start": pl.UInt32,
    "stop": pl.String,
    "status": pl.String,
    "error": pl.String,
    "answers": pl.List(pl.String),
    "score": pl.Float64,
    "prompt_ids": pl.List(pl.UInt32),
    "decoded_ids": pl.List(pl.UInt32),
}


class TraceWriter:
    """A trace directory that is being filled.

    Parameters
    ----------
    path : Path
        Directory; made if it is not there.
    run : dict
        Everything that decides what the trace will hold, JSON-ready. A directory that was begun with
        another run is refused.

    Raises
    ------
    CoverageLabError
        If the directory holds something else, another run, or is being written by another process.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self.run: dict[str, Any] = json.loads(schema.to_json(run))
        self.finished = False
        with _disk_errors(path):
            self._begin()

    def _begin(self) -> None:
        check_directory(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        # The lock lives as long as this object; it ends with the process, however that ends.
        self._lock = _lock(self.path)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        check_directory(self.path)  # again: another process may have ended in between
        begun, done = self.path / schema.RUN, self.path / schema.MANIFEST
        self.finished = done.exists()
        if self.finished:
            manifest = _held(done)
            self._compare(manifest.get("run", {}), "a finished trace")
            if not all(map(self._intact, manifest.get("files", []))):
                self._reopen(manifest)
        elif begun.exists():
            self._compare(_held(begun), "an unfinished trace")
        for leftover in self.path.rglob(schema.TEMPORARY + "*"):
            leftover.unlink()
        if self.finished:
            self._clean()
            return
        if not begun.exists():
            schema.write_atomic(begun, schema.to_json(self.run))
        for name in (schema.ROWS, schema.JOURNAL):
            (self.path / name).mkdir(exist_ok=True)

    def _reopen(self, manifest: dict[str, Any]) -> None:
        """Make a finished trace that lost files an unfinished one: those requests are yet to come."""
        requests, *rest = manifest["files"]
        known = pl.read_parquet(self.path / requests["path"]) if self._intact(requests) else pl.DataFrame()
        (self.path / schema.JOURNAL).mkdir(exist_ok=True)
        schema.write_atomic(self.path / schema.RUN, schema.to_json(self.run))
        for line in known.iter_rows(named=True):
            files = [file for file in rest if Path(file["path"]).stem == line["request_id"]]
            if all(map(self._intact, files)):
                self._enter(line, files)
        (self.path / schema.MANIFEST).unlink()
        self.finished = False

    def _intact(self, file: dict[str, Any]) -> bool:
        path = self.path / file["path"]
        return path.is_file() and schema.file_sha256(path) == file["sha256"]

    def _enter(self, request: dict[str, Any], files: list[dict[str, Any]]) -> None:
        entry = self.path / schema.JOURNAL / f"{request['request_id']}.json"
        schema.write_atomic(entry, schema.to_json({"request": request, "files": files}))

    def _compare(self, held: dict[str, Any], what: str) -> None:
        for key, ours, theirs in _differences(self.run, held):
            if key.startswith("versions."):
                raise CoverageLabError(
                    f"{self.path} holds {what} made with {key.removeprefix('versions.')} {theirs}, "
                    f"and this is {ours}; go back to it, or give another directory with -o"
                )
            raise CoverageLabError(
                f"{self.path} holds {what} made with {key} = {theirs}, not {ours}; "
                "repeat the command it was begun with, or give another directory with -o"
            )

    def done(self, request_id: str) -> dict[str, Any] | None:
        """Return the journal entry of a request that is finished, its files intact, or None."""
        entry = self.path / schema.JOURNAL / f"{request_id}.json"
        try:
            record: dict[str, Any] = json.loads(entry.read_bytes())
            return record if all(map(self._intact, record["files"])) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(
        self,
        request: dict[str, Any],
        rows: pl.DataFrame | None = None,
        tensors: bytes | None = None,
    ) -> None:
        """Add a finished request.

        Parameters
        ----------
        request : dict
            Its line of the requests table.
        rows : DataFrame, optional
            Its rows, sorted by layer, KV head and step.
        tensors : bytes, optional
            A safetensors file.
        """
        request_id = request["request_id"]
        files: list[dict[str, Any]] = []
        with _disk_errors(self.path):
            if rows is not None and len(rows):
                buffer = BytesIO()
                max_pages = int(rows["n_pages"].max())  # type: ignore[arg-type]
                layer = int((rows["layer"] == rows["layer"][0]).sum())
                group = layer * max(1, GROUP_SHARES // (layer * max_pages))
                rows.write_parquet(buffer, compression="zstd", row_group_size=group, statistics=True)
                shape = {"rows": len(rows), "max_pages": max_pages}
                files.append(self._add(f"{schema.ROWS}/{request_id}.parquet", buffer.getvalue(), **shape))
            if tensors is not None:
                (self.path / schema.TENSORS).mkdir(exist_ok=True)
                files.append(self._add(f"{schema.TENSORS}/{request_id}.safetensors", tensors))
            self._enter(request, files)

    def _add(self, name: str, data: bytes, **more: Any) -> dict[str, Any]:
        digest = schema.write_atomic(self.path / name, data)
        return {"path": name, "bytes": len(data), "sha256": digest, **more}

    def finish(self, request_ids: list[str], facts: dict[str, Any]) -> None:
        """Write the requests table and the manifest from the journal, then remove the journal.

        Parameters
        ----------
        request_ids : list of str
            All requests, in the order of the table.
        facts : dict
            What the manifest says beside the run: model geometry, notes.
        """
        records = [
            json.loads((self.path / schema.JOURNAL / f"{name}.json").read_bytes()) for name in request_ids
        ]
        table = pl.DataFrame([record["request"] for record in records], schema=REQUEST_SCHEMA)
        buffer = BytesIO()
        table.write_parquet(buffer, compression="zstd")
        with _disk_errors(self.path):
            requests = self._add(schema.REQUESTS, buffer.getvalue(), rows=len(table))
            manifest = {
                "schema": schema.SCHEMA,
                "schema_version": schema.VERSION,
                "run": self.run,
                **facts,
                "files": [requests, *(file for record in records for file in record["files"])],
            }
            schema.write_atomic(self.path / schema.MANIFEST, schema.to_json(manifest))
            self._clean()
        self.finished = True

    def _clean(self) -> None:
        shutil.rmtree(self.path / schema.JOURNAL, ignore_errors=True)
        (self.path / schema.RUN).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)


def check_directory(path: Path) -> None:
    """Raise CoverageLabError if `path` holds anything but a trace of this schema."""
    with _disk_errors(path):
        if not path.exists():
            return
        if not path.is_dir():
            raise CoverageLabError(f"{path} is a file; give a directory with -o")
        if (path / schema.MANIFEST).exists():
            manifest = _held(path / schema.MANIFEST)
            if manifest.get("schema") == schema.SCHEMA:
                if manifest.get("schema_version") == schema.VERSION:
                    return
                raise CoverageLabError(
                    f"{path} holds a trace of schema {manifest.get('schema_version')}, not {schema.VERSION}; "
                    "give another directory with -o"
                )
        elif (path / schema.RUN).exists():
            _held(path / schema.RUN)
            return
        if any(entry.name != schema.TEMPORARY + schema.RUN for entry in path.iterdir()):
            raise CoverageLabError(f"{path} is not empty and no trace; give another directory with -o")


def _held(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise CoverageLabError(f"{file} is damaged; restore it, or give another directory with -o")
    return record


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CoverageLabError(
            f"another process is writing to {directory}; wait for it or give another -o"
        ) from None
    return descriptor


def _differences(
    ours: dict[str, Any], theirs: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    def last(key: str) -> tuple[bool, str]:
        # An option says more than what follows from it, such as the files of a data set.
        return isinstance(ours.get(key, theirs.get(key)), dict), key

    for key in sorted(ours.keys() | theirs.keys(), key=last):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield prefix + key, a, b


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CoverageLabError(
                f"the disk is full at {path}; free some space and run the same command again: "
                "finished requests are kept"
            ) from None
        raise CoverageLabError(f"can't write to {path}: {error.strerror or error}") from None
