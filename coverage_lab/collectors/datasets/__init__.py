"""Prompt sources. A new one is a new file in this package with a registered class."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from coverage_lab.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, in the pieces that decide how an over-long one is cut.

    The prompt reads `before + context + after`; only `context` is ever cut.

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
    cut : {"middle", "end", "never"}
        Which part of `context` goes when the prompt is too long; `never` makes that an error.
    answers : tuple of str
        Reference answers, best first; forced decoding feeds the first.
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
    cut: Literal["middle", "end", "never"] = "middle"
    answers: tuple[str, ...] = ()
    chat: bool = True
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Base class: options are fields, `examples` streams the prompts.

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
