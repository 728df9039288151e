"""Prompts from the user's own JSON Lines files."""

from dataclasses import dataclass
from typing import ClassVar

from coverage_lab.collectors.datasets import Example, register
from coverage_lab.collectors.datasets._task_files import JsonLinesFiles
from coverage_lab.collectors.reading import Row


@register("jsonl")
@dataclass(frozen=True, kw_only=True)
class JsonLines(JsonLinesFiles):
    """Rows of a `.jsonl` file, or of each such file in a directory; a file is a task.

    A row has `prompt`, or `context` and `question` (also called `input`), and may have `answer`
    (a text) or `answers` (a text or a list of them). A prompt that is too long loses the middle:
    of the whole `prompt`, or of the `context` only.
    """

    title: ClassVar[str] = "Your own prompts, one JSON object a line"

    def example(self, task: str, index: int, row: Row) -> Example:
        if "prompt" in row.fields:
            context, after = row.text("prompt"), ""
        else:
            if "context" not in row.fields:
                raise row.fault("no field 'prompt', and no 'context' with a 'question'")
            question = row.text(
                "input" if "input" in row.fields and "question" not in row.fields else "question"
            )
            context, after = row.text("context"), f"\n\n{question}" if question else ""
        if not (context + after).strip():
            raise row.fault("the prompt is empty")
        answers: tuple[str, ...] = ()
        if row.fields.get("answers") is not None:
            answers = row.texts("answers")
        elif row.fields.get("answer") is not None:
            answers = (row.text("answer"),)
        return Example(
            task=task, index=index, context=context, after=after, answers=answers, source=row.where
        )
