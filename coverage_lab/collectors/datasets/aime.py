"""AIME: problems of the American Invitational Mathematics Examination, whose answers are integers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, register
from coverage_lab.collectors.metrics.integers import final_integer
from coverage_lab.collectors.reading import Row, json_rows, pick_tasks, sha256_of, task_files
from coverage_lab.errors import CoverageLabError

QUESTION = (
    "\n\nWork this out step by step. The answer is an integer from 0 to 999: "
    "end with it, and nothing else, in \\boxed{}."
)

# Such as "80", "080 or 081" and "080 or 081 (both were accepted)".
_ANSWER = re.compile(r"(\d{1,3}(?: or \d{1,3})*)(?: \(.*\))?")


@register("aime")
@dataclass(frozen=True, kw_only=True)
class Aime(Dataset):
    """Problems from a `.jsonl` file, or from each such file of a directory; a file is a task.

    A row has `problem` (or `question`) and `answer`: a number, or text with one or with several that
    are joined by "or". A solution scores 1 if the integer it ends with (see `final_integer`) is one of
    them, else 0.
    """

    title: ClassVar[str] = "AIME problems, one JSON object a line"

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        files = self._files()
        return (example for task, file in files.items() for example in self._read(task, file))

    def readable(self) -> list[str]:
        return list(self._files())

    def describe(self) -> dict[str, Any]:
        return {"files": {file.name: sha256_of(file) for file in self._files().values()}}

    def score(self, example: Example, text: str) -> float:
        return float(final_integer(text) in example.answers)

    def _files(self) -> dict[str, Path]:
        files = task_files(self.path, (".jsonl",))
        return {task: files[task] for task in pick_tasks(self.tasks, list(files))}

    def _read(self, task: str, file: Path) -> Iterator[Example]:
        empty = True
        with file.open("rb") as lines:
            for index, row in enumerate(islice(json_rows(lines, str(file)), self.limit)):
                empty = False
                problem = row.text(
                    "question" if "problem" not in row.fields and "question" in row.fields else "problem"
                )
                if not problem.strip():
                    raise row.fault("the problem is empty")
                yield Example(
                    task=task,
                    index=index,
                    context=problem.strip(),
                    after=QUESTION,
                    cut="never",
                    answers=_answers(row),
                    source=row.where,
                )
        if empty:
            raise CoverageLabError(f"{file}: no rows")


def _answers(row: Row) -> tuple[str, ...]:
    value = row.fields.get("answer")
    text = str(value) if type(value) is int else row.text("answer").strip()
    found = _ANSWER.fullmatch(text)
    if not found:
        raise row.fault(f"answer {text!r} is no integer from 0 to 999")
    return tuple(dict.fromkeys(str(int(number)) for number in found[1].split(" or ")))
