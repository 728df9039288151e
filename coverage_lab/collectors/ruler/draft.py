"""What a kind of task is given, and what it makes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal, Protocol

from coverage_lab.collectors.ruler.sources import Sources


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt of which all is drawn but the size of its haystack.

    Parameters
    ----------
    answers : tuple of str
    before, after, prefix : str
        As in `Example`.
    context : callable
        Returns the haystack of so many units; the more of them, the longer it is.
    fewest : int
        Units of the smallest haystack that still holds what is hidden in it.
    rest : callable, optional
        Returns what would follow so many units, and may be cut anywhere: RULER has whole units alone, and
        this is for lengths that those miss.
    """

    answers: tuple[str, ...]
    before: str
    context: Callable[[int], str]
    after: str
    prefix: str
    fewest: int = 1
    rest: Callable[[int], str] = lambda units: ""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one prompt is drawn from.

    Parameters
    ----------
    rng : Random
        Generator of this prompt alone.
    index : int
        Place of the prompt in its task.
    prompt_tokens : int
        The length it shall have.
    count : callable
        Tokens of a text as the model would be given it.
    sources : Sources
        Essays and questions.
    """

    rng: Random
    index: int
    prompt_tokens: int
    count: Callable[[str], int]
    sources: Sources


class Task(Protocol):
    """A kind of task with its parameters.

    `answer_tokens` is what RULER lets a model answer with, and `match` how much of the reference has to
    stand in the answer: all of it, in parts, or any one of its texts.
    """

    answer_tokens: ClassVar[int]
    match: ClassVar[Literal["all", "any"]]

    def draft(self, draw: Draw) -> Draft:
        """Return a prompt that waits for the size of its haystack."""
