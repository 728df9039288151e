"""Where the essays and the questions come from: files of the user, or the text of the data set `docs`."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coverage_lab.collectors.reading import has_half_pair, read_json, read_text, sha256_of
from coverage_lab.collectors.ruler.corpus import Corpus, read_corpus
from coverage_lab.collectors.ruler.essays import Essay
from coverage_lab.errors import CoverageLabError

_TEXT = (".txt", ".md")
_ESSAYS = "PaulGrahamEssays.json"  # as RULER's script leaves it
_QUESTIONS = {"squad": ("squad.json", "qa_1.json"), "hotpotqa": ("hotpotqa.json", "qa_2.json")}


@dataclass(frozen=True)
class Sources:
    """Texts for the haystacks, found by name.

    Parameters
    ----------
    path : Path, optional
        A text file or a question file, or a directory. In a directory and its folders `essays`, `qa`
        and `json`, the `.txt` and `.md` files or PaulGrahamEssays.json are the essays, squad.json or
        qa_1.json are the questions of qa_1, and hotpotqa.json or qa_2.json those of qa_2. A `.json`
        file of another name is that of qa_1 where it is the only one.

    """

    path: Path | None

    def check(self) -> None:
        """Raise CoverageLabError if the path leads to no text and to no questions."""
        if self.path is None:
            return
        if not self.path.exists():
            raise CoverageLabError(f"{self.path}: no such file or directory")
        if not self._essay_files and not self._question_files:
            raise CoverageLabError(
                f"{self.path}: no essays (*.txt, *.md) and no questions (squad.json, hotpotqa.json); "
                "without --data-dir, essays are Python's documentation"
            )

    @cached_property
    def essay(self) -> Essay:
        """The running text."""
        essay = Essay(self._essay_text())
        if not essay.words:
            raise CoverageLabError(f"{self._essay_files[0]}: no text")
        return essay

    def has_questions(self, data: str) -> bool:
        """Whether there is a file of the questions `squad` or `hotpotqa`."""
        return data in self._question_files

    def questions(self, data: str) -> Corpus:
        """Return the questions `squad` or `hotpotqa`."""
        return self._corpora[data]

    def describe(self) -> dict[str, Any]:
        """Return what decides the texts."""
        described: dict[str, Any] = {
            "files": {
                file.name: sha256_of(file) for file in (*self._essay_files, *self._question_files.values())
            }
        }
        if not self._essay_files:
            from coverage_lab.collectors.datasets.docs import LanguageReference

            described["essays"] = LanguageReference().describe()
        return described

    @cached_property
    def _files(self) -> list[Path]:
        if self.path is None:
            return []
        if self.path.is_file():
            return [self.path]
        folders = [self.path, *(self.path / name for name in ("essays", "qa", "json"))]
        return [
            file
            for folder in folders
            if folder.is_dir()
            for file in sorted(folder.iterdir())
            if file.is_file() and not file.name.startswith(".")
        ]

    @cached_property
    def _essay_files(self) -> list[Path]:
        named = [file for file in self._files if file.name == _ESSAYS]
        return named or [file for file in self._files if file.suffix.lower() in _TEXT]

    @cached_property
    def _question_files(self) -> dict[str, Path]:
        left = [file for file in self._files if file.suffix.lower() == ".json" and file.name != _ESSAYS]
        found = {
            data: file for data, names in _QUESTIONS.items() if (file := _named(left, names)) is not None
        }
        other = [file for file in left if file not in found.values()]
        if "squad" not in found and len(other) == 1:
            found["squad"] = other[0]
        return found

    @cached_property
    def _corpora(self) -> dict[str, Corpus]:
        return {data: read_corpus(file) for data, file in self._question_files.items()}

    def _essay_text(self) -> str:
        if not self._essay_files:
            from coverage_lab.collectors.datasets.docs import corpus

            return corpus()
        return "\n".join(map(_essay_of, self._essay_files))


def _essay_of(file: Path) -> str:
    if file.name != _ESSAYS:
        return read_text(file)
    held = read_json(file)
    text = held.get("text") if isinstance(held, dict) else None
    if not isinstance(text, str) or has_half_pair(text):
        raise CoverageLabError(f"{file}: no field 'text' with text")
    return text


def _named(files: Iterable[Path], names: tuple[str, ...]) -> Path | None:
    return next((file for name in names for file in files if file.name == name), None)
