"""What a replay has finished, request by request, so that a stopped one goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from coverage_lab.errors import CoverageLabError


class Journal:
    """A file of JSON lines: what was run, then the records of each finished request.

    Lines are written in the order of the requests, so that a run that was stopped and goes on ends with the
    same bytes as one that was not.

    Parameters
    ----------
    path : Path
    run : dict
        What decides the records: policies, lists, steps, trace, weights.

    Raises
    ------
    CoverageLabError
        If the file holds another run, or is none of these files.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self._path = path
        self.finished: dict[str, list[dict[str, Any]]] = {}
        head = json.dumps({"replay": run}) + "\n"
        try:
            held = path.read_text(encoding="utf-8") if path.exists() else ""
            # A line that was being written when the run was stopped does not count.
            whole = held[: held.rfind("\n") + 1]
            if not whole:
                whole = head
                path.write_text(head, encoding="utf-8")
            elif whole != held:
                os.truncate(path, len(whole.encode()))
        except (OSError, UnicodeDecodeError) as error:
            raise CoverageLabError(f"can't use {path}: {error}") from None
        first, *lines = whole.splitlines(keepends=True)
        if first != head:
            raise CoverageLabError(
                f"{path} holds another replay ({_difference(first, run)}); give another --output"
            )
        for line in lines:
            request = json.loads(line)
            self.finished[request["request_id"]] = request["records"]

    def add(self, request_id: str, records: list[dict[str, Any]]) -> None:
        """Write the records of a finished request."""
        line = json.dumps({"request_id": request_id, "records": records}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CoverageLabError(f"can't write {self._path}: {error.strerror or error}") from None
        self.finished[request_id] = records


def _difference(line: str, run: dict[str, Any]) -> str:
    """Return the names of what differs between the run of a file's first line and this one."""
    try:
        held = json.loads(line)["replay"]
        return ", ".join(sorted(name for name in held.keys() | run.keys() if held.get(name) != run.get(name)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "it does not begin like one"
