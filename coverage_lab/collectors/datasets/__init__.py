"""Prompt sources. A new one is a new file in this package with a registered class."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from coverage_lab.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, in the pieces that decide how an over-long one is cut.

    The prompt reads `before + context + after`, and then `prefix`; only `context` is ever cut.

    Parameters
    ----------
    task : str
        Group that the prompt belongs to; letters, digits, `-` and `_` only.
    index : int
        Place of the prompt within its task; `task` and `index` name the request.
    context : str
        The long part.
    before, after : str
        What stands around it (instructions, the question).
    prefix : str
        What the answer begins with: it ends the prompt, behind the chat template where there is one.
    cut : {"middle", "end", "never"}
        Which part of `context` goes when the prompt is too long; `never` makes that an error.
    answers : tuple of str
        Reference answers, best first; forced decoding feeds the first.
    choices : tuple of str
        What the answer is one of, where the scoring asks for it.
    answer_tokens : int, optional
        Tokens of the model's answer that count for its score; by default all.
    chat : bool
        Whether the prompt is meant for the chat template (few-shot and plain text are not).
    source : str
        File and line, or a like place, for messages.
    """

    task: str
    index: int
    context: str
    before: str = ""
    after: str = ""
    prefix: str = ""
    cut: Literal["middle", "end", "never"] = "middle"
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer_tokens: int | None = None
    chat: bool = True
    source: str = ""


Counter = Callable[[Example], int]  # tokens of a finished prompt, chat template included


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Base class: options are fields, `examples` streams the prompts.

    `task_names` are all the tasks there are; it is empty where every file of the user is one.

    Parameters
    ----------
    path : Path, optional
        File or directory that holds the data.
    tasks : tuple of str
        Tasks to take, in this order; empty means all.
    limit : int, optional
        At most this many prompts of each task.
    seed : int
        Seed of whatever the data set draws at random.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    task_names: ClassVar[tuple[str, ...]] = ()

    path: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    seed: int = 0

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        """Yield the prompts in a fixed order.

        Parameters
        ----------
        prompt_tokens : int
            Length in tokens that each prompt will be cut to.
        steps : int
            Decode steps that will follow, for sources whose reference is the text that goes on.
        """
        raise NotImplementedError

    def with_counter(self, count: Counter) -> "Dataset":
        """Return the data set with a tokenizer's counts, for those that make prompts of a length."""
        return self

    def readable(self) -> Sequence[str]:
        """Return the tasks of which each has a file of its own, or is made, and so can be read alone."""
        return ()

    def score(self, example: Example, text: str) -> float | None:
        """Return how good an answer is, from 0 to 1, or None where the data set has no scoring.

        Parameters
        ----------
        example : Example
            What was asked.
        text : str
            What the model said, without the prefix.
        """
        return None

    def check(self, example: Example, prompt_tokens: int, tokens: int | None) -> str | None:
        """Return what is wrong with a prompt that was well-formed enough to be read, or None.

        Parameters
        ----------
        example : Example
        prompt_tokens : int
            The length that was asked of `examples`.
        tokens : int, optional
            The length that the prompt has, where a tokenizer is at hand.
        """
        return None

    def default_prompt_tokens(self, room: int | None) -> int | None:
        """Return the length that prompts are cut to when the user asks for none; None cuts nothing.

        `room` is what the model's window holds beside the decode steps, None where it has no window.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return what the manifest should say about the data (wording, hashes, versions)."""
        return {}


datasets: Registry[Dataset] = Registry("dataset", __name__)
register = datasets.register
