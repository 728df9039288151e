"""AIME: problems of the American Invitational Mathematics Examination, whose answers are integers."""

import re
from dataclasses import dataclass
from typing import ClassVar

from coverage_lab.collectors.datasets import Example, register
from coverage_lab.collectors.datasets._task_files import JsonLinesFiles
from coverage_lab.collectors.metrics.integers import final_integer
from coverage_lab.collectors.reading import Row

QUESTION = (
    "\n\nWork this out step by step. The answer is an integer from 0 to 999: "
    "end with it, and nothing else, in \\boxed{}."
)

# Such as "80", "080 or 081" and "080 or 081 (both were accepted)".
_ANSWER = re.compile(r"(\d{1,3}(?: or \d{1,3})*)(?: \(.*\))?")


@register("aime")
@dataclass(frozen=True, kw_only=True)
class Aime(JsonLinesFiles):
    """Problems from a `.jsonl` file, or from each such file of a directory; a file is a task.

    A row has `problem` (or `question`) and `answer`: a number, or text with one or with several that
    are joined by "or". A solution scores 1 if the integer it ends with (see `final_integer`) is one of
    them, else 0.
    """

    title: ClassVar[str] = "AIME problems, one JSON object a line"

    def example(self, task: str, index: int, row: Row) -> Example:
        problem = row.text(
            "question" if "problem" not in row.fields and "question" in row.fields else "problem"
        )
        if not problem.strip():
            raise row.fault("the problem is empty")
        return Example(
            task=task,
            index=index,
            context=problem.strip(),
            after=QUESTION,
            cut="never",
            answers=_answers(row),
            source=row.where,
        )

    def score(self, example: Example, text: str) -> float:
        return float(final_integer(text) in example.answers)


def _answers(row: Row) -> tuple[str, ...]:
    value = row.fields.get("answer")
    text = str(value) if type(value) is int else row.text("answer").strip()
    found = _ANSWER.fullmatch(text)
    if not found:
        raise row.fault(f"answer {text!r} is no integer from 0 to 999")
    return tuple(dict.fromkeys(str(int(number)) for number in found[1].split(" or ")))
