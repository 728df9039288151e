"""Running text as a haystack: so many words of it, with sentences hidden between its own."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

# RULER's forty places to hide a sentence, in percent of the sentences before it: 0 to 100, evenly spaced.
DEPTHS = tuple(round(100 * place / 39) for place in range(40))

_ENDS = re.compile(r"""[.!?]["')\]”’]*$""")
_OPENS = re.compile(r"""["'(\[“‘]*[A-Z0-9]""")
_ABBREVIATIONS = re.compile(r"\(?(?:Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|vs|e\.g|i\.e|etc|cf|No|Fig|[A-Z])\.$")


class Essay:
    """A text that goes on from its start when it ends, with white space evened out.

    Sentences end at a full stop, question or exclamation mark before a capital or a digit, but for
    common abbreviations and initials. RULER asks NLTK, which knows more abbreviations.

    Parameters
    ----------
    text : str
    """

    def __init__(self, text: str) -> None:
        self.words = text.split()

    @cached_property
    def _ends(self) -> list[int]:
        """For each sentence the number of words up to its end; the last one ends with the text."""
        inner = [
            place
            for place, (word, following) in enumerate(pairwise(self.words), start=1)
            if _ENDS.search(word) and not _ABBREVIATIONS.match(word) and _OPENS.match(following)
        ]
        return [*inner, len(self.words)]

    def hiding(self, sentences: Sequence[str], depths: Sequence[int], words: int) -> str:
        """Return the first words of the text with sentences hidden in it.

        Parameters
        ----------
        sentences : sequence of str
            What to hide, in order.
        depths : sequence of int
            For each the percentage of the text's sentences that stand before it, rising.
        words : int
            Words of the text.
        """
        turns = -(-words // len(self.words))
        text = (self.words * turns)[:words]
        ends = [turn * len(self.words) + end for turn in range(turns) for end in self._ends]
        del ends[bisect_left(ends, words) + 1 :]
        starts = [0, *ends[:-1], words]
        pieces, last = [], 0
        for sentence, depth in zip(sentences, depths, strict=True):
            place = starts[(len(starts) - 1) * depth // 100]
            pieces += [*text[last:place], sentence]
            last = place
        return " ".join([*pieces, *text[last:]])
