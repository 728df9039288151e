"""Frequent words extraction: made-up words whose counts fall off like a power of their rank."""

import math
import string
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

from coverage_lab.collectors.ruler.draft import Draft, Draw

_BEFORE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
_AFTER = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

_NOISE = "..."  # stands in for the word of the first rank
_LETTERS = 6
_ASKED = 3


@dataclass(frozen=True, kw_only=True)
class FrequentWords:
    """RULER's `freq_words_extraction`: one word of the vocabulary for every 50 tokens of the prompt.

    Parameters
    ----------
    alpha : float
        Of all words, the one of rank k makes up k**-alpha / zeta(alpha), rounded down.
    """

    answer_tokens: ClassVar[int] = 50
    match: ClassVar[Literal["all", "any"]] = "all"

    alpha: float = 2.0

    def draft(self, draw: Draw) -> Draft:
        from scipy.special import zeta

        rng = draw.rng
        size = max(draw.prompt_tokens // 50, 1 + _ASKED)
        drawn: dict[str, None] = {}
        while len(drawn) < size - 1:
            drawn["".join(rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
        vocabulary = [_NOISE, *drawn]
        parts = [rank**-self.alpha / float(zeta(self.alpha)) for rank in range(1, size + 1)]
        seed = rng.getrandbits(64)

        def context(words: int) -> str:
            text = [
                word for word, part in zip(vocabulary, parts, strict=True) for _ in range(int(words * part))
            ]
            Random(seed).shuffle(text)
            return " ".join(text)

        # So many words that the last one asked for is more frequent than the first one that is not.
        beyond = parts[1 + _ASKED] if size > 1 + _ASKED else 0.0
        return Draft(
            answers=tuple(vocabulary[1 : 1 + _ASKED]),
            before=_BEFORE,
            context=context,
            after=_AFTER,
            prefix=_PREFIX,
            fewest=math.ceil(1 / (parts[_ASKED] - beyond)),
        )
