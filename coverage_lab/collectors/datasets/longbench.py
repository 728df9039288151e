"""LongBench v1 (Bai et al., 2024): 21 tasks of long documents in English and Chinese, and code."""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, _longbench_scoring, register
from coverage_lab.collectors.datasets._longbench_wording import WORDING
from coverage_lab.collectors.reading import Row, json_rows, pick_tasks, read_text, sha256_of
from coverage_lab.errors import CoverageLabError

TASKS = tuple(WORDING)

# Few-shot and completion tasks, which LongBench gives to the model without the chat template.
PLAIN_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})

HUB_DATASET = "THUDM/LongBench"
PROMPT_FILE = "dataset2prompt.json"


@dataclass(frozen=True)
class _Source:
    """The rows of one task: what to call the file, and how to open it."""

    label: str
    open: Callable[[], AbstractContextManager[IO[bytes]]]


@register("longbench")
@dataclass(frozen=True, kw_only=True)
class LongBench(Dataset):
    """LongBench rows, from a local directory or from the hub.

    `<task>.jsonl` is looked for in `path` and its `data` and `v1` folders; without `path`, data.zip
    is downloaded from the hub. `dataset2prompt.json`, LongBench's own prompts, is used if it lies in
    `path`, its `config` folder, a folder that holds rows, or the parent of `path`; otherwise the
    prompts are in this project's words. A prompt that is too long loses its middle, whatever stands
    there, as in LongBench. Tasks without a file are left out unless they are asked for.

    Answers are scored as in LongBench, over the tokens that it lets a model answer with; Chinese ones
    over characters (see `metrics.chinese`).
    """

    title: ClassVar[str] = "LongBench v1, 21 tasks"
    task_names: ClassVar[tuple[str, ...]] = TASKS

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        templates, _ = self._prompts
        sources = self._sources
        return (
            example
            for task, source in sources.items()
            for example in self._read(task, source, templates[task])
        )

    def score(self, example: Example, text: str) -> float | None:
        if not example.answers:
            return None
        return _longbench_scoring.score(example.task, text, example.answers, example.choices)

    def check(self, example: Example, prompt_tokens: int, tokens: int | None) -> str | None:
        return _longbench_scoring.fault(example.task, example.answers, example.choices)

    def default_prompt_tokens(self, room: int | None) -> int | None:
        return room  # the official rule: what fits in the model's window

    def readable(self) -> list[str]:
        return list(self._sources)

    def describe(self) -> dict[str, Any]:
        files = [self._archive] if self.path is None else self._files.values()
        return {"prompts": self._prompts[1], "files": {file.name: sha256_of(file) for file in files}}

    def _read(self, task: str, source: _Source, template: str) -> Iterator[Example]:
        with source.open() as lines:
            for index, row in enumerate(islice(json_rows(lines, source.label), self.limit)):
                yield Example(
                    task=task,
                    index=index,
                    context=render(template, row),
                    answers=row.texts("answers"),
                    choices=row.texts("all_classes") if row.fields.get("all_classes") else (),
                    answer_tokens=_longbench_scoring.ANSWER_TOKENS[task],
                    chat=task not in PLAIN_TASKS,
                    source=row.where,
                )

    @cached_property
    def _sources(self) -> dict[str, _Source]:
        if self.path is not None:
            return {task: _Source(str(file), partial(_open_file, file)) for task, file in self._files.items()}
        try:
            with zipfile.ZipFile(self._archive) as archive:
                members = {PurePosixPath(name).name: name for name in archive.namelist()}
        except zipfile.BadZipFile:
            raise CoverageLabError(f"{self._archive}: not a zip file; download it again") from None
        sources = {
            task: _Source(f"{self._archive}/{member}", partial(_open_member, self._archive, member))
            for task in pick_tasks(self.tasks, list(TASKS))
            if (member := members.get(f"{task}.jsonl")) is not None
        }
        self._check(sources, str(self._archive))
        return sources

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each task, in a local directory."""
        assert self.path is not None
        if not self.path.is_dir():
            raise CoverageLabError(f"{self.path}: no such directory")
        folders = (self.path, self.path / "data", self.path / "v1")
        files = {
            task: file
            for task in pick_tasks(self.tasks, list(TASKS))
            if (file := _first_file(folders, f"{task}.jsonl")) is not None
        }
        self._check(files, f"{self.path} (and data/ and v1/ in it)")
        return files

    def _check(self, found: Iterable[str], where: str) -> None:
        for task in self.tasks:
            if task not in found:
                raise CoverageLabError(f"{where}: no {task}.jsonl")
        if not found:
            raise CoverageLabError(f"{where}: no LongBench file, such as hotpotqa.jsonl")

    @cached_property
    def _archive(self) -> Path:
        """The data.zip of the hub, downloaded once."""
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(HUB_DATASET, "data.zip", repo_type="dataset"))
        # The hub client lets through its own errors and those of whichever HTTP library it uses.
        except Exception as error:
            raise CoverageLabError(
                f"cannot download data.zip of {HUB_DATASET} from the hub ({type(error).__name__}); "
                "name a local copy with --data-dir"
            ) from error

    @cached_property
    def _prompts(self) -> tuple[dict[str, str], str]:
        """The template of each task, and what to call them."""
        if self.path is None:
            return WORDING, "coverage-lab wording"
        beside = [file.parent for file in self._files.values()]
        file = _first_file((self.path, self.path / "config", *beside, self.path.parent), PROMPT_FILE)
        if file is None:
            return WORDING, "coverage-lab wording"
        try:
            templates = json.loads(read_text(file))
        except ValueError:
            raise CoverageLabError(f"{file}: not valid JSON") from None
        for task in self._files:
            if not isinstance(templates, dict) or not isinstance(templates.get(task), str):
                raise CoverageLabError(f"{file}: no prompt for the task {task!r}")
        return templates, f"official {PROMPT_FILE} (sha256 {sha256_of(file)})"


def render(template: str, row: Row) -> str:
    """Fill a template's `{context}` and `{input}`; every other brace stays as it is."""
    texts = {field: row.text(field) for field in ("context", "input")}
    return re.sub(r"\{(context|input)\}", lambda match: texts[match[1]], template)


def _first_file(folders: Iterable[Path], name: str) -> Path | None:
    return next((file for folder in folders if (file := folder / name).is_file()), None)


def _open_file(file: Path) -> IO[bytes]:
    return file.open("rb")


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(archive) as opened, opened.open(member) as lines:
        yield lines
