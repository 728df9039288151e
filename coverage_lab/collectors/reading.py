"""Read rows and text from local files, with errors that name the file and the line."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage_lab.errors import CoverageLabError
from coverage_lab.registry import unknown


@dataclass(frozen=True)
class Row:
    """One JSON object of a file.

    Parameters
    ----------
    where : str
        `file:line`, for messages.
    fields : dict
        The object.
    """

    where: str
    fields: dict[str, Any]

    def fault(self, what: str) -> CoverageLabError:
        """Return the error that says `what` is wrong with this row."""
        return CoverageLabError(f"{self.where}: {what}")

    def text(self, field: str) -> str:
        """Return a field that must be there and hold text."""
        if field not in self.fields:
            raise self.fault(f"no field {field!r}")
        return self._checked(field, self.fields[field])

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a field that must be there and hold one text or a list of them."""
        value = self.fields.get(field)
        if isinstance(value, list):
            return tuple(self._checked(field, item) for item in value)
        return (self.text(field),)

    def _checked(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fault(f"field {field!r} holds {json_type(value)} where text is expected")
        try:
            value.encode()
        except UnicodeEncodeError:
            # JSON can spell half a surrogate pair, which no tokenizer accepts.
            raise self.fault(f"field {field!r} holds half a surrogate pair") from None
        return value


def json_rows(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file, passing over blank lines.

    Parameters
    ----------
    lines : iterable of bytes
        The file, opened in binary mode so that a byte that is not UTF-8 has a line number.
    name : str
        What messages call the file.

    Raises
    ------
    CoverageLabError
        At a line that is not UTF-8, not JSON, or no object.
    """
    for number, line in enumerate(lines, start=1):
        where = f"{name}:{number}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise CoverageLabError(f"{where}: not UTF-8") from None
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise CoverageLabError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
            raise CoverageLabError(f"{where}: not valid JSON") from None
        if not isinstance(fields, dict):
            hint = "; one JSON object a line" if isinstance(fields, list) else ""
            raise CoverageLabError(f"{where}: {json_type(fields)} where an object is expected{hint}")
        yield Row(where, fields)


def json_type(value: Any) -> str:
    """Return what JSON calls the type of a value."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or fail with the line of the first byte that is not."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CoverageLabError(f"{path}:{line}: not UTF-8") from None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def task_name(stem: str) -> str:
    """Return a file's stem as a task name: letters, digits, `-` and `_`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "task"


def task_files(path: Path | None, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the file of each task, in the order of the file names.

    Parameters
    ----------
    path : Path, optional
        A file, or a directory whose files with one of the suffixes are taken.
    suffixes : tuple of str
        Such as `(".txt", ".md")`.

    Raises
    ------
    CoverageLabError
        If there is no file, or two of them give one task name.
    """
    kinds = " or ".join(f"*{suffix}" for suffix in suffixes)
    if path is None:
        raise CoverageLabError(f"no data given; name a file or a directory of {kinds} with --data-dir")
    if path.is_file():
        return {task_name(path.stem): path}
    if not path.is_dir():
        raise CoverageLabError(f"{path}: no such file or directory")
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or file.suffix.lower() not in suffixes or not file.is_file():
            continue
        held = files.setdefault(task_name(file.stem), file)
        if held != file:
            raise CoverageLabError(
                f"{held} and {file.name} both give the task {task_name(file.stem)!r}; rename one of them"
            )
    if not files:
        raise CoverageLabError(f"{path}: no {kinds} in this directory")
    return files


def pick_tasks(asked: tuple[str, ...], known: list[str]) -> list[str]:
    """Return the tasks asked for, each once, or all of them if none is asked for."""
    for task in asked:
        if task not in known:
            raise unknown("task", task, known)
    return list(dict.fromkeys(asked)) or known
