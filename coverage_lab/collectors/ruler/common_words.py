"""Common words extraction: a numbered list in which ten words come up more often than the others."""

from dataclasses import dataclass
from itertools import chain, islice, repeat
from random import Random
from typing import ClassVar, Literal

from coverage_lab.collectors.ruler.draft import Draft, Draw
from coverage_lab.collectors.ruler.growing import Growing
from coverage_lab.collectors.ruler.words import shuffled_words

_BEFORE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_AFTER = "\nQuestion: What are the 10 most common words in the above list?"
_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

_SHORT = 4096  # tokens of prompt and answer below which RULER makes small lists


@dataclass(frozen=True, kw_only=True)
class CommonWords:
    """RULER's `common_words_extraction`.

    As in RULER a small worked example stands first; it comes before the question in the same turn. In
    prompts that are shorter than 4,096 tokens with their answer, words come up less often; here also in
    longer ones that the more frequent words do not fit in.

    Parameters
    ----------
    common : int
        Words to find.
    times, other_times : int
        How often each of them, and each other word, is in the list.
    """

    answer_tokens: ClassVar[int] = 120
    match: ClassVar[Literal["all", "any"]] = "all"

    common: int = 10
    times: int = 30
    other_times: int = 3

    def draft(self, draw: Draw) -> Draft:
        if draw.prompt_tokens + self.answer_tokens >= _SHORT:
            draft = self._draft(draw, (40, 10, 3), self.times, self.other_times)
            shortest = draft.before + draft.context(draft.fewest) + draft.after + draft.prefix
            if draw.prompt_tokens > 2 * _SHORT or draw.count(shortest) <= draw.prompt_tokens:
                return draft
        return self._draft(draw, (20, 3, 1), 6, 1)

    def _draft(self, draw: Draw, example: tuple[int, int, int], times: int, other_times: int) -> Draft:
        rng = draw.rng
        shown = list(islice(shuffled_words(rng), example[0]))
        listed = self._list(shown, example[1], example[2], rng.getrandbits(64))
        answer = _numbered(shown[: self.common])
        words, seed = Growing(shuffled_words(rng)), rng.getrandbits(64)
        return Draft(
            answers=tuple(words.first(self.common)),
            before=f"{_BEFORE}{listed}{_AFTER}{_PREFIX} {answer}\n{_BEFORE}",
            context=lambda count: self._list(words.first(count), times, other_times, seed),
            after=_AFTER,
            prefix=_PREFIX,
            fewest=self.common,
        )

    def _list(self, words: list[str], times: int, other_times: int, seed: int) -> str:
        common, others = words[: self.common], words[self.common :]
        listed = list(
            chain.from_iterable(
                [*(repeat(word, times) for word in common), *(repeat(word, other_times) for word in others)]
            )
        )
        Random(seed).shuffle(listed)
        return _numbered(listed)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))
