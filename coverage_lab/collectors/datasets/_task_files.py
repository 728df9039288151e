"""What data sets share of which every file of the user is a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example
from coverage_lab.collectors.reading import Row, json_rows, pick_tasks, sha256_of, task_files
from coverage_lab.errors import CoverageLabError


@dataclass(frozen=True, kw_only=True)
class TaskFiles(Dataset):
    """A file, or each file of a directory that ends in one of `suffixes`; a file is a task."""

    suffixes: ClassVar[tuple[str, ...]]

    def readable(self) -> list[str]:
        return list(self.files())

    def describe(self) -> dict[str, Any]:
        return {"files": {file.name: sha256_of(file) for file in self.files().values()}}

    def files(self) -> dict[str, Path]:
        """Return the files by task, in the order of the tasks."""
        found = task_files(self.path, self.suffixes)
        return {task: found[task] for task in pick_tasks(self.tasks, list(found))}


@dataclass(frozen=True, kw_only=True)
class JsonLinesFiles(TaskFiles, ABC):
    """Files of one JSON object a line; a subclass makes examples of them."""

    suffixes = (".jsonl",)

    @abstractmethod
    def example(self, task: str, index: int, row: Row) -> Example:
        """Return the prompt of a row, or raise its fault."""

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        files = self.files()
        return (example for task, file in files.items() for example in self._read(task, file))

    def _read(self, task: str, file: Path) -> Iterator[Example]:
        empty = True
        with file.open("rb") as lines:
            for index, row in enumerate(islice(json_rows(lines, str(file)), self.limit)):
                empty = False
                yield self.example(task, index, row)
        if empty:
            raise CoverageLabError(f"{file}: no rows")
