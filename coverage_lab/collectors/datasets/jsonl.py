"""Prompts from the user's own JSON Lines files."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, register
from coverage_lab.collectors.reading import Row, json_rows, pick_tasks, sha256_of, task_files
from coverage_lab.errors import CoverageLabError


@register("jsonl")
@dataclass(frozen=True, kw_only=True)
class JsonLines(Dataset):
    """Rows of a `.jsonl` file, or of each such file in a directory; a file is a task.

    A row has `prompt`, or `context` and `question` (also called `input`), and may have `answer`
    (a text) or `answers` (a text or a list of them). A prompt that is too long loses the middle:
    of the whole `prompt`, or of the `context` only.
    """

    title: ClassVar[str] = "Your own prompts, one JSON object a line"

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        files = self._files()
        return (example for task, file in files.items() for example in self._read(task, file))

    def readable(self) -> list[str]:
        return list(self._files())

    def describe(self) -> dict[str, Any]:
        return {"files": {file.name: sha256_of(file) for file in self._files().values()}}

    def _files(self) -> dict[str, Path]:
        files = task_files(self.path, (".jsonl",))
        return {task: files[task] for task in pick_tasks(self.tasks, list(files))}

    def _read(self, task: str, file: Path) -> Iterator[Example]:
        empty = True
        with file.open("rb") as lines:
            for index, row in enumerate(islice(json_rows(lines, str(file)), self.limit)):
                empty = False
                yield _example(task, index, row)
        if empty:
            raise CoverageLabError(f"{file}: no rows")


def _example(task: str, index: int, row: Row) -> Example:
    if "prompt" in row.fields:
        context, after = row.text("prompt"), ""
    else:
        if "context" not in row.fields:
            raise row.fault("no field 'prompt', and no 'context' with a 'question'")
        question = row.text("input" if "input" in row.fields and "question" not in row.fields else "question")
        context, after = row.text("context"), f"\n\n{question}" if question else ""
    if not (context + after).strip():
        raise row.fault("the prompt is empty")
    answers: tuple[str, ...] = ()
    if row.fields.get("answers") is not None:
        answers = row.texts("answers")
    elif row.fields.get("answer") is not None:
        answers = (row.text("answer"),)
    return Example(task=task, index=index, context=context, after=after, answers=answers, source=row.where)
