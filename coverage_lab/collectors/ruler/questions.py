"""Questions on documents, of which only some hold the answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

from coverage_lab.collectors.ruler.draft import Draft, Draw
from coverage_lab.collectors.ruler.growing import Growing

_INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\n"
)
_BEFORE = _INSTRUCTION + "The following are given documents.\n\n"
_AFTER = "\n\n" + _INSTRUCTION + "Question: {query}"
_PREFIX = " Answer:"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """RULER's `qa`: question i of a file, among so many of the file's documents.

    The documents that hold the answer come with others, first with those of the same article, and
    again with all of them once every one is there. Questions whose answers their documents do not
    write out, such as HotpotQA's yes and no, are left out; RULER keeps them.

    Parameters
    ----------
    data : str
        Which file: `squad` or `hotpotqa`, the names of RULER's own.
    """

    answer_tokens: ClassVar[int] = 32
    match: ClassVar[Literal["all", "any"]] = "any"

    data: str

    def draft(self, draw: Draw) -> Draft:
        rng = draw.rng
        corpus = draw.sources.questions(self.data)
        question = corpus.questions[draw.index]
        order = Growing(_order(len(corpus.documents), question.own, question.related, rng))
        seed = rng.getrandbits(64)

        def context(count: int) -> str:
            places = order.first(count)
            Random(seed).shuffle(places)
            return "\n\n".join(document(*pair) for pair in enumerate(places, start=1))

        def document(number: int, place: int) -> str:
            return f"Document {number}:\n{corpus.documents[place]}"

        return Draft(
            answers=question.answers,
            before=_BEFORE,
            context=context,
            after=_AFTER.format(query=question.text),
            prefix=_PREFIX,
            fewest=len(question.own),
            rest=lambda count: "\n\n" + document(count + 1, order.first(count + 1)[-1]),
        )


def _order(count: int, own: tuple[int, ...], related: tuple[int, ...], rng: Random) -> Iterator[int]:
    """Yield the places of the documents in the order in which they are taken, without end."""
    yield from own
    yield from rng.sample(related, len(related))
    first = {*own, *related}
    others = [place for place in range(count) if place not in first]
    rng.shuffle(others)
    yield from others
    while True:
        yield from rng.sample(range(count), count)
