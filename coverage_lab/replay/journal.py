"""What a replay has finished, request by request, so that a stopped one goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace.schema import write_atomic


class Journal:
    """A file of JSON lines: what was run, then the records of each finished request.

    Lines stand in the order of the requests, so that a run that was stopped and goes on, or one that tries a
    failed request again, ends with the same bytes as one that went through.

    Parameters
    ----------
    path : Path
    run : dict
        What decides the records: policies, lists, steps, trace, weights.
    order : sequence of str
        All requests.

    Raises
    ------
    CoverageLabError
        If the file holds another run, is damaged, or is none of these files.
    """

    def __init__(self, path: Path, run: dict[str, Any], order: Sequence[str]) -> None:
        self._path, self._head = path, json.dumps({"replay": run}) + "\n"
        self._places = {name: place for place, name in enumerate(order)}
        self.finished: dict[str, list[dict[str, Any]]] = {}
        try:
            held = path.read_text(encoding="utf-8") if path.exists() else ""
        except OSError as error:
            raise CoverageLabError(
                f"can't read {path}: {error.strerror or error}; give another --output"
            ) from None
        except UnicodeDecodeError:
            raise CoverageLabError(_no_journal(path)) from None
        # A line that was being written when the run was stopped does not count.
        first, *lines = held[: held.rfind("\n") + 1].splitlines(keepends=True) or [held]
        if not self._head.startswith(first):
            different = _difference(first, run)
            raise CoverageLabError(
                f"{path} holds another replay ({different}); give another --output"
                if different
                else _no_journal(path)
            )
        for number, line in enumerate(lines, 2):
            try:
                request = json.loads(line)
                name, records = request["request_id"], list(request["records"])
                known = name in self._places and name not in self.finished
                if not known or request["sha256"] != _digest(name, records):
                    raise ValueError
                self.finished[name] = records
            except (ValueError, TypeError, KeyError):
                raise CoverageLabError(
                    f"line {number} of {path} is damaged; restore it, or give another --output"
                ) from None
        if held != self._text():
            self._write()

    def add(self, request_id: str, records: list[dict[str, Any]]) -> None:
        """Write the records of a finished request."""
        place = self._places.__getitem__
        last = not self.finished or place(request_id) > max(map(place, self.finished))
        self.finished[request_id] = records
        if not last:  # it failed before, and others came after it
            return self._write()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._line(request_id))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CoverageLabError(f"can't write {self._path}: {error.strerror or error}") from None

    def _line(self, request_id: str) -> str:
        records = self.finished[request_id]
        digest = _digest(request_id, records)
        return json.dumps({"request_id": request_id, "sha256": digest, "records": records}) + "\n"

    def _text(self) -> str:
        return self._head + "".join(map(self._line, sorted(self.finished, key=self._places.__getitem__)))

    def _write(self) -> None:
        try:
            write_atomic(self._path, self._text().encode())
        except OSError as error:
            raise CoverageLabError(f"can't write {self._path}: {error.strerror or error}") from None


def _digest(request_id: str, records: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([request_id, records]).encode()).hexdigest()[:16]


def _difference(line: str, run: dict[str, Any]) -> str:
    """Return the names of what differs between the run of a file's first line and this one, if it has one."""
    try:
        held = json.loads(line)["replay"]
        return ", ".join(sorted(name for name in held.keys() | run.keys() if held.get(name) != run.get(name)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return ""


def _no_journal(path: Path) -> str:
    return f"{path} is there already and no file of finished requests; give another --output"
