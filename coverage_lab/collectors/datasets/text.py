"""Windows of plain text, for prompts whose reference is the text that goes on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coverage_lab.collectors.datasets import Example, register
from coverage_lab.collectors.datasets._task_files import TaskFiles
from coverage_lab.collectors.reading import read_text
from coverage_lab.errors import CoverageLabError

# Far above what tokenizers average, so that a window surely fills the prompt and the steps after it.
CHARACTERS_PER_TOKEN = 8

DEFAULT_PROMPT_TOKENS = 4096


@register("text")
@dataclass(frozen=True, kw_only=True)
class PlainText(TaskFiles):
    """Evenly spaced windows of a text file, or of each `.txt` and `.md` file in a directory.

    A file is a task. `limit` is the number of windows of each file (one by default, from its start).
    """

    title: ClassVar[str] = "Windows of plain text files"
    suffixes = (".txt", ".md")

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        files = self.files()
        characters = CHARACTERS_PER_TOKEN * (prompt_tokens + steps)
        return (example for task, file in files.items() for example in self._windows(task, file, characters))

    def default_prompt_tokens(self, room: int | None) -> int:
        return DEFAULT_PROMPT_TOKENS if room is None else min(room, DEFAULT_PROMPT_TOKENS)

    def _windows(self, task: str, file: Path, characters: int) -> Iterator[Example]:
        # Without the white space at the end no window can be blank.
        text = read_text(file).rstrip()
        if not text:
            raise CoverageLabError(f"{file}: no text")
        count = 1 if self.limit is None else self.limit
        starts = dict.fromkeys(i * len(text) // count for i in range(count))
        for index, start in enumerate(starts):
            line = text.count("\n", 0, start) + 1
            yield Example(
                task=task,
                index=index,
                context=text[start : start + characters],
                cut="end",
                chat=False,
                source=f"{file}:{line}",
            )
