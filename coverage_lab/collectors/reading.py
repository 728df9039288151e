"""Read rows and text from local files, with errors that name the file and the line."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from coverage_lab.errors import CoverageLabError
from coverage_lab.registry import unknown

# Characters of a long JSON array that are read at first; a longer row doubles them.
_CHUNK = 1 << 20


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
        if has_half_pair(value):
            raise self.fault(f"field {field!r} holds half a surrogate pair")
        return value


def has_half_pair(text: str) -> bool:
    """Whether a text holds half a surrogate pair: JSON can spell one, and no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


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
            fields = json.loads(text.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            raise CoverageLabError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
            raise CoverageLabError(f"{where}: not valid JSON") from None
        if not isinstance(fields, dict):
            hint = "; one JSON object a line" if isinstance(fields, list) else ""
            raise CoverageLabError(f"{where}: {json_type(fields)} where an object is expected{hint}")
        yield Row(where, fields)


def json_array(path: Path) -> Iterator[Row]:
    """Yield the objects of a file that holds one JSON array, with no more than a few in memory.

    Raises
    ------
    CoverageLabError
        If the file is no array of objects, or at the row where it stops being one; rows count from 1.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, fields in enumerate(_array_items(file), start=1):
                where = f"{path}:row {number}"
                if not isinstance(fields, dict):
                    raise CoverageLabError(f"{where}: {json_type(fields)} where an object is expected")
                yield Row(where, fields)
        except UnicodeDecodeError:
            raise CoverageLabError(f"{path}: not UTF-8") from None
        except _NotJson as fault:
            raise CoverageLabError(f"{path}: not a valid JSON array (at row {fault.row})") from None


class _NotJson(Exception):
    def __init__(self, row: int) -> None:
        self.row = row


def _array_items(file: TextIO) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    row, size = 1, _CHUNK
    while (held := file.read(size)).isspace():
        pass
    at = _skip(held, 0)
    if not held.startswith("[", at):
        raise _NotJson(row)
    at += 1
    while True:
        at = _skip(held, at)
        if held.startswith("]", at) and row == 1:
            break
        try:
            item, end = decoder.raw_decode(held, at)
            end = _skip(held, end)
        except (ValueError, RecursionError):
            item, end = None, len(held)
        # A row that goes to the end of what is held may go on behind it.
        if end == len(held):
            more = file.read(size)
            if not more:
                raise _NotJson(row)
            held, at, size = held[at:] + more, 0, 2 * size
            continue
        yield item
        row, size = row + 1, _CHUNK
        if held[end] == "]":
            at = end
            break
        if held[end] != ",":
            raise _NotJson(row)
        at = end + 1
    if held[at + 1 :].strip() or file.read().strip():
        raise _NotJson(row)


def _skip(text: str, at: int) -> int:
    """Return the place of the next character that is not white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_json(path: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise CoverageLabError(f"{path}: not valid JSON") from None


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
