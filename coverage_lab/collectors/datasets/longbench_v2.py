"""LongBench v2 (Bai et al., 2025): multiple-choice questions on texts of up to 2 million words."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, register
from coverage_lab.collectors.metrics.choice import chosen
from coverage_lab.collectors.reading import (
    Row,
    json_array,
    json_rows,
    pick_tasks,
    read_text,
    sha256_of,
    task_name,
)
from coverage_lab.errors import CoverageLabError
from coverage_lab.registry import unknown

DOMAINS = (
    "Single-Document QA",
    "Multi-Document QA",
    "Long In-context Learning",
    "Long-dialogue History Understanding",
    "Code Repository Understanding",
    "Long Structured Data Understanding",
)
TASKS = {task_name(domain.lower()): domain for domain in DOMAINS}
LETTERS = ("A", "B", "C", "D")

HUB_DATASET = "THUDM/LongBench-v2"
DATA_FILE = "data.json"
PROMPT_FILE = "0shot.txt"

ANSWER_TOKENS = 128

# $DOC$, $Q$ and $C_A$ to $C_D$ stand for the text, the question and the choices, as in LongBench v2.
WORDING = (
    "Here is a long text; a question about it with four choices comes after it.\n\n$DOC$\n\n"
    "Question: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
    "One choice is right. Reply with this sentence and its letter, such as: The correct answer is (B)"
)

_FIELDS = {"$DOC$": "context", "$Q$": "question"} | {
    f"$C_{letter}$": f"choice_{letter}" for letter in LETTERS
}


@register("longbench-v2")
@dataclass(frozen=True, kw_only=True)
class LongBenchV2(Dataset):
    """LongBench v2 rows, from local files or from the hub; a domain is a task.

    `path` is a `.jsonl` file, a `.json` file with one array, or a directory with data.json or `.jsonl`
    files; without it data.json is downloaded from the hub. `0shot.txt`, LongBench's own prompt, is used
    if it lies in `path` or beside it, there or in a folder `prompts`; otherwise the prompt is in this
    project's words. Prompts come in the order of the rows, and one that is too long loses its middle,
    whatever stands there, as in LongBench v2.

    An answer scores 1 if the letter that it names (see `chosen`) is the right one, else 0.
    """

    title: ClassVar[str] = "LongBench v2, 503 multiple-choice questions"
    task_names: ClassVar[tuple[str, ...]] = tuple(TASKS)

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        tasks, template, files = pick_tasks(self.tasks, list(TASKS)), self._template[0], self._files
        return self._read(tasks, template, files)

    def default_prompt_tokens(self, room: int | None) -> int | None:
        return room  # the official rule: what fits in the model's window

    def describe(self) -> dict[str, Any]:
        return {"prompts": self._template[1], "files": {file.name: sha256_of(file) for file in self._files}}

    def score(self, example: Example, text: str) -> float:
        return float(chosen(text) in example.answers)

    def _read(self, tasks: list[str], template: str, files: list[Path]) -> Iterator[Example]:
        taken: Counter[str] = Counter()
        for file in files:
            for row in _rows(file):
                task = _task(row)
                if task not in tasks or taken[task] == self.limit:
                    continue
                yield _example(row, task, taken[task], template)
                taken[task] += 1
                if all(taken[task] == self.limit for task in tasks):
                    return
        for task in self.tasks:
            if not taken[task]:
                raise CoverageLabError(
                    f"{files[0].parent}: no row of the domain {TASKS[task]!r} for the task {task}"
                )
        if not taken:
            raise CoverageLabError(f"{files[0]}: no rows")

    @cached_property
    def _files(self) -> list[Path]:
        if self.path is None:
            return [self._downloaded]
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise CoverageLabError(f"{self.path}: no such file or directory")
        if (self.path / DATA_FILE).is_file():
            return [self.path / DATA_FILE]
        files = sorted(file for file in self.path.glob("*.jsonl") if not file.name.startswith("."))
        if not files:
            raise CoverageLabError(f"{self.path}: no {DATA_FILE} and no *.jsonl in this directory")
        return files

    @cached_property
    def _downloaded(self) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(HUB_DATASET, DATA_FILE, repo_type="dataset"))
        # The hub client lets through its own errors and those of whichever HTTP library it uses.
        except Exception as error:
            raise CoverageLabError(
                f"cannot download {DATA_FILE} of {HUB_DATASET} from the hub ({type(error).__name__}); "
                "name a local copy with --data-dir"
            ) from error

    @cached_property
    def _template(self) -> tuple[str, str]:
        """The prompt, and what to call it."""
        folders = [] if self.path is None else [self._files[0].parent, self._files[0].parent.parent]
        places = (place for folder in folders for place in (folder, folder / "prompts"))
        file = next((file for place in places if (file := place / PROMPT_FILE).is_file()), None)
        if file is None:
            return WORDING, "coverage-lab wording"
        template = read_text(file)
        for field in _FIELDS:
            if field not in template:
                raise CoverageLabError(f"{file}: no {field} in this prompt; leave the file out or mend it")
        return template, f"official {PROMPT_FILE} (sha256 {sha256_of(file)})"


def _rows(file: Path) -> Iterator[Row]:
    if file.suffix.lower() == ".json":
        yield from json_array(file)
    else:
        with file.open("rb") as lines:
            yield from json_rows(lines, str(file))


def _task(row: Row) -> str:
    task = task_name(row.text("domain").lower())
    if task not in TASKS:
        fault = unknown("domain", row.text("domain"), list(DOMAINS))
        raise row.fault(str(fault))
    return task


def _example(row: Row, task: str, index: int, template: str) -> Example:
    answer = row.text("answer").strip()
    if answer not in LETTERS:
        raise row.fault(f"answer {answer!r} is none of A, B, C and D")
    texts = {mark: row.text(field).strip() for mark, field in _FIELDS.items()}
    for mark in ("$DOC$", "$Q$"):
        if not texts[mark]:
            raise row.fault(f"field {_FIELDS[mark]!r} is empty")
    marks = "|".join(map(re.escape, _FIELDS))
    return Example(
        task=task,
        index=index,
        context=re.sub(marks, lambda match: texts[match[0]], template),
        answers=(answer,),
        choices=LETTERS,
        answer_tokens=ANSWER_TOKENS,
        source=row.where,
    )
