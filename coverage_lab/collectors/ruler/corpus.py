"""Read question files: SQuAD's layout and HotpotQA's."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage_lab.collectors.reading import has_half_pair, json_type, read_json
from coverage_lab.errors import CoverageLabError


@dataclass(frozen=True)
class Question:
    """A question, and the places of documents in its corpus.

    Parameters
    ----------
    text : str
    answers : tuple of str
        Any of them will do.
    own : tuple of int
        Documents that are needed to answer it.
    related : tuple of int
        Other documents of the same article.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """The documents of a file, each once, and the questions that they answer in so many words."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Asked:
    """A question with its documents in full."""

    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    article: tuple[str, ...] = ()


def read_corpus(path: Path) -> Corpus:
    """Read a JSON file of questions.

    Parameters
    ----------
    path : Path
        SQuAD's layout (an object with articles of paragraphs), or HotpotQA's (an array of questions).

    Raises
    ------
    CoverageLabError
        If the file has another layout or no question with an answer, naming the place of the fault.
    """
    held = read_json(path)
    if isinstance(held, dict) and isinstance(held.get("data"), list):
        asked = list(_squad(_Place(path, "", held)))
    elif isinstance(held, list):
        asked = list(_hotpot(_Place(path, "", held)))
    else:
        raise CoverageLabError(
            f"{path}: neither SQuAD's layout (an object with 'data') nor HotpotQA's (an array); "
            "name another file with --data-dir"
        )
    documents = sorted({text for question in asked for text in (*question.own, *question.article)})
    place = {text: number for number, text in enumerate(documents)}
    questions = []
    for question in asked:
        own = tuple(dict.fromkeys(place[text] for text in question.own))
        held_in = " ".join(question.own).lower()
        if any(answer.lower() in held_in for answer in question.answers):
            article = dict.fromkeys(place[text] for text in question.article)
            related = tuple(number for number in article if number not in own)
            questions.append(Question(question.text, question.answers, own, related))
    if not questions:
        raise CoverageLabError(f"{path}: no question has an answer that its documents hold")
    return Corpus(tuple(documents), tuple(questions))


@dataclass(frozen=True)
class _Place:
    """A value somewhere in a JSON file, with the way to it for messages."""

    file: Path
    way: str
    value: Any

    def field(self, name: str) -> "_Place":
        if not isinstance(self.value, dict):
            raise self.fault("an object")
        if name not in self.value:
            raise CoverageLabError(f"{self.file}: {self.way}: no field {name!r}")
        return _Place(self.file, f"{self.way}.{name}" if self.way else name, self.value[name])

    def items(self) -> list["_Place"]:
        if not isinstance(self.value, list):
            raise self.fault("an array")
        return [_Place(self.file, f"{self.way}[{number}]", item) for number, item in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fault("text")
        if has_half_pair(self.value):
            raise CoverageLabError(f"{self.file}: {self.way}: half a surrogate pair")
        return self.value

    def fault(self, expected: str) -> CoverageLabError:
        what = json_type(self.value)
        return CoverageLabError(f"{self.file}: {self.way}: {what} where {expected} is expected")


def _squad(root: _Place) -> Iterator[_Asked]:
    for article in root.field("data").items():
        paragraphs = article.field("paragraphs").items()
        contexts = tuple(paragraph.field("context").text() for paragraph in paragraphs)
        for paragraph, context in zip(paragraphs, contexts, strict=True):
            for asked in paragraph.field("qas").items():
                text = asked.field("question").text()
                # SQuAD 2 has questions without an answer, and keeps plausible ones elsewhere.
                if asked.value.get("is_impossible", False):
                    continue
                answers = [answer.field("text").text() for answer in asked.field("answers").items()]
                yield _Asked(text, tuple(filter(None, dict.fromkeys(answers))), (context,), contexts)


def _hotpot(root: _Place) -> Iterator[_Asked]:
    for asked in root.items():
        documents = []
        for document in asked.field("context").items():
            parts = document.items()
            if len(parts) != 2:
                raise document.fault("a title with its sentences")
            documents.append(parts[0].text() + "\n" + "".join(part.text() for part in parts[1].items()))
        answer = asked.field("answer").text()
        yield _Asked(asked.field("question").text(), (answer,) if answer else (), tuple(documents))
