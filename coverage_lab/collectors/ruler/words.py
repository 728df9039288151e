"""Words, numbers and identifiers to hide: the word lists are those of the package wonderwords."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from uuid import UUID


@dataclass(frozen=True)
class WordLists:
    """Words of each kind, sorted, each once."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]


@cache
def word_lists() -> WordLists:
    """Return the lists of wonderwords."""
    from wonderwords import RandomWord

    words = RandomWord(enhanced_prefixes=False)
    kinds = (sorted(set(words.filter(include_categories=[kind]))) for kind in ("noun", "adjective", "verb"))
    return WordLists(*map(tuple, kinds))


def compound(rng: Random) -> str:
    """Draw two words such as `quiet-harbor`."""
    lists = word_lists()
    return f"{rng.choice(lists.adjectives)}-{rng.choice(lists.nouns)}"


def number(rng: Random) -> str:
    """Draw a number of seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def identifier(rng: Random) -> str:
    """Draw a UUID of version 4."""
    return str(UUID(int=rng.getrandbits(128), version=4))


DRAWS = {"words": compound, "numbers": number, "uuids": identifier}


def distinct(kind: str, rng: Random) -> Iterator[str]:
    """Draw things of one kind without end, none of them twice."""
    seen: set[str] = set()
    while True:
        drawn = DRAWS[kind](rng)
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def shuffled_words(rng: Random) -> Iterator[str]:
    """Yield all words in a drawn order, and then compounds without end, none of them twice.

    RULER turns to a second list of 370,000 words where it needs more than wonderwords has.
    """
    lists = word_lists()
    words = sorted({*lists.nouns, *lists.adjectives, *lists.verbs})
    rng.shuffle(words)
    yield from words
    known = frozenset(words)
    yield from (drawn for drawn in distinct("words", rng) if drawn not in known)
