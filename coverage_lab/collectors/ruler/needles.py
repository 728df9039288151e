"""Needles in a haystack: keys with their values, hidden in text that may look like them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar, Literal

from coverage_lab.collectors.ruler.draft import Draft, Draw
from coverage_lab.collectors.ruler.essays import DEPTHS
from coverage_lab.collectors.ruler.growing import Growing
from coverage_lab.collectors.ruler.words import distinct

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_BEFORE = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
_AFTER = "\nWhat {are_all} the special magic {kind} for {query} mentioned in the provided text?"
_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"


@dataclass(frozen=True, kw_only=True)
class Needles:
    """RULER's `niah`: some keys have values; the question is for all values of some keys.

    Keys and values are all different, which RULER leaves to chance.

    Parameters
    ----------
    haystack : {"noise", "essay", "needle"}
        One line over and over; running text; other needles.
    keys, values : {"words", "numbers", "uuids"}
    num_keys, num_values, num_queries : int
        Keys, values of each key, keys that are asked for.
    """

    answer_tokens: ClassVar[int] = 128
    match: ClassVar[Literal["all", "any"]] = "all"

    haystack: Literal["noise", "essay", "needle"]
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def draft(self, draw: Draw) -> Draft:
        rng = draw.rng
        num_keys = max(self.num_keys, self.num_queries)
        all_keys, all_values = distinct(self.keys, rng), distinct(self.values, rng)
        pairs = [
            (key, tuple(islice(all_values, self.num_values))) for key in list(islice(all_keys, num_keys))
        ]
        hidden = [self._needle(key, value) for key, values in pairs for value in values]
        rng.shuffle(hidden)
        asked = rng.sample(pairs, self.num_queries)
        *most, last = (key for key, _ in asked)
        query = f"{', '.join(most)}, and {last}" if most else last
        single = self.num_queries * self.num_values == 1
        words = {
            "some": "A" if single else "Some",
            "are": "is" if single else "are",
            "are_all": "is" if single else "are all",
            "kind": self.values.removesuffix("s") if single else self.values,
            "query": query,
        }
        others = Growing(self._needle(key, next(all_values)) for key in all_keys)
        return Draft(
            answers=tuple(value for _, values in asked for value in values),
            before=_BEFORE.format(**words),
            context=self._context(draw, hidden, others),
            after=_AFTER.format(**words),
            prefix=_PREFIX.format(**words),
            fewest=1 if self.haystack == "essay" else len(hidden),
            rest=lambda lines: self._rest(others, lines),
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.values, key=key, value=value)

    def _context(self, draw: Draw, hidden: list[str], others: Growing[str]) -> Callable[[int], str]:
        if self.haystack == "essay":
            depths = sorted(draw.rng.sample(DEPTHS, len(hidden)))
            return lambda words: draw.sources.essay.hiding(hidden, depths, words)
        places = draw.rng.getrandbits(64)
        if self.haystack == "noise":
            return lambda lines: "\n".join(scattered(hidden, [NOISE] * lines, places))
        return lambda lines: "\n".join(scattered(hidden, others.first(lines), places))

    def _rest(self, others: Growing[str], lines: int) -> str:
        if self.haystack == "essay":
            return ""
        return "\n" + (NOISE if self.haystack == "noise" else others.first(lines + 1)[-1])


def scattered(hidden: list[str], lines: list[str], seed: int) -> list[str]:
    """Return the lines with others hidden among them in order, each right before another line."""
    places = sorted(Random(seed).sample(range(len(lines)), len(hidden)), reverse=True)
    for place, line in zip(places, reversed(hidden), strict=True):
        lines.insert(place, line)
    return lines
