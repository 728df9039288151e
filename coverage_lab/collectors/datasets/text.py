"""Windows of plain text, for prompts whose reference is the text that goes on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, register
from coverage_lab.collectors.reading import pick_tasks, read_text, sha256_of, task_files
from coverage_lab.errors import CoverageLabError

# Far above what tokenizers average, so that a window surely fills the prompt and the steps after it.
CHARACTERS_PER_TOKEN = 8

DEFAULT_PROMPT_TOKENS = 4096


@register("text")
@dataclass(frozen=True, kw_only=True)
class PlainText(Dataset):
    """Evenly spaced windows of a text file, or of each `.txt` and `.md` file in a directory.

    A file is a task. `limit` is the number of windows of each file (one by default, from its start).
    """

    title: ClassVar[str] = "Windows of plain text files"

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        files = self._files()
        characters = CHARACTERS_PER_TOKEN * (prompt_tokens + steps)
        return (example for task, file in files.items() for example in self._windows(task, file, characters))

    def default_prompt_tokens(self, room: int | None) -> int:
        return DEFAULT_PROMPT_TOKENS if room is None else min(room, DEFAULT_PROMPT_TOKENS)

    def readable(self) -> list[str]:
        return list(self._files())

    def describe(self) -> dict[str, Any]:
        return {"files": {file.name: sha256_of(file) for file in self._files().values()}}

    def _files(self) -> dict[str, Path]:
        files = task_files(self.path, (".txt", ".md"))
        return {task: files[task] for task in pick_tasks(self.tasks, list(files))}

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
