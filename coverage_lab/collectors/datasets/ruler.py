"""RULER (Hsieh et al., 2024): 13 synthetic tasks at any length in tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from random import Random
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Counter, Dataset, Example, register
from coverage_lab.collectors.metrics.containment import cleaned, contained
from coverage_lab.collectors.reading import pick_tasks
from coverage_lab.collectors.ruler.draft import Draft, Draw
from coverage_lab.collectors.ruler.fitting import fit
from coverage_lab.collectors.ruler.questions import Questions
from coverage_lab.collectors.ruler.sources import Sources
from coverage_lab.collectors.ruler.tasks import TASKS
from coverage_lab.errors import CoverageLabError

DEFAULT_PROMPTS = 8
DEFAULT_PROMPT_TOKENS = 4096

# A prompt has at most the tokens that were asked for, and at least so many less one in a hundred.
TOLERANCE = 100

# Haystacks of large pieces may leave more room than that: other draws leave other room.
DRAWS = 32


@register("ruler")
@dataclass(frozen=True, kw_only=True)
class Ruler(Dataset):
    """RULER's tasks, made for the model's tokenizer.

    Prompts have the length asked for, or up to 1% less; RULER's own lengths count the answer as well.
    `limit` is the number of prompts of each task (8 by default). Prompt i of a task depends on the
    seed, the task, i, the length and the tokenizer alone. Essays and questions are looked for in
    `path` (see `Sources`); without a text there, essays are the Python documentation that `docs`
    uses, and without a question file its task is left out unless it is asked for.

    Each prompt ends with the beginning of the answer, as in RULER, behind the chat template.
    """

    title: ClassVar[str] = "RULER, 13 tasks generated at any length"
    task_names: ClassVar[tuple[str, ...]] = tuple(TASKS)

    count: Counter | None = None

    def with_counter(self, count: Counter) -> "Ruler":
        return replace(self, count=count)

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        prompts = {task: self._prompts(task) for task in self._tasks}
        if self.count is None:
            raise CoverageLabError("ruler makes prompts of a length in tokens: name the model with --model")
        if prompt_tokens < 1:
            raise CoverageLabError("ruler makes prompts of a length in tokens: give --max-prompt-tokens")
        return (
            self._example(task, index, prompt_tokens)
            for task, count in prompts.items()
            for index in range(count)
        )

    def default_prompt_tokens(self, room: int | None) -> int:
        return DEFAULT_PROMPT_TOKENS if room is None else min(room, DEFAULT_PROMPT_TOKENS)

    def readable(self) -> list[str]:
        return self._tasks

    def describe(self) -> dict[str, Any]:
        self._sources.check()
        return {"wonderwords": version("wonderwords"), **self._sources.describe()}

    def score(self, example: Example, text: str) -> float:
        return contained(cleaned(text), example.answers, TASKS[example.task].match)

    def check(self, example: Example, prompt_tokens: int, tokens: int | None) -> str | None:
        if tokens is not None and not _least(prompt_tokens) <= tokens <= prompt_tokens:
            return f"{tokens} tokens are not within 1% under {prompt_tokens}"
        if self.score(example, example.context) < 1:
            return "the text does not hold the answers"
        return None

    @cached_property
    def _sources(self) -> Sources:
        return Sources(self.path)

    @cached_property
    def _tasks(self) -> list[str]:
        self._sources.check()
        found = []
        for name in pick_tasks(self.tasks, list(TASKS)):
            task = TASKS[name]
            if not isinstance(task, Questions) or self._sources.has_questions(task.data):
                found.append(name)
            elif name in self.tasks:
                raise CoverageLabError(
                    f"{name} needs a file of questions: name {task.data}.json, or a directory that holds it, "
                    "with --data-dir"
                )
        return found

    def _prompts(self, name: str) -> int:
        wanted = DEFAULT_PROMPTS if self.limit is None else self.limit
        task = TASKS[name]
        if isinstance(task, Questions):
            return min(wanted, len(self._sources.questions(task.data).questions))
        return wanted

    def _example(self, name: str, index: int, prompt_tokens: int) -> Example:
        """Draw prompts until one has the length; if none does, fill up the longest with a cut piece."""
        best: tuple[int, int, Draft] | None = None
        lengths = []
        for number in range(DRAWS):
            draft = self._draft(name, index, prompt_tokens, number)
            units, tokens = fit(self._length(name, index, draft), prompt_tokens, draft.fewest)
            lengths.append(tokens)
            if tokens <= prompt_tokens and (best is None or tokens > best[0]):
                best = tokens, units, draft
                if tokens >= _least(prompt_tokens):
                    return _made(name, index, draft, units)
        if best is None:
            raise CoverageLabError(
                f"ruler: the shortest prompt of {name} has {min(lengths)} tokens; "
                f"raise --max-prompt-tokens from {prompt_tokens}"
            )
        _, units, draft = best
        filled, most = self._length(name, index, draft, units), len(draft.rest(units))
        characters, _ = fit(filled, prompt_tokens, fewest=0, most=most)
        return _made(name, index, draft, units, characters)

    def _length(self, name: str, index: int, draft: Draft, units: int | None = None) -> Callable[[int], int]:
        """Return what counts a draft's tokens over its units or, those given, over characters of the rest."""

        def tokens(size: int) -> int:
            fixed = (size, 0) if units is None else (units, size)
            return self._counted(_made(name, index, draft, *fixed))

        return tokens

    def _draft(self, name: str, index: int, prompt_tokens: int, number: int) -> Draft:
        draw = Draw(
            rng=Random(f"{self.seed}/{name}/{index}/{number}"),
            index=index,
            prompt_tokens=prompt_tokens,
            count=lambda text: self._counted(Example(task=name, index=index, context=text)),
            sources=self._sources,
        )
        return TASKS[name].draft(draw)

    def _counted(self, example: Example) -> int:
        assert self.count is not None
        return self.count(example)


def _made(name: str, index: int, draft: Draft, units: int, characters: int = 0) -> Example:
    return Example(
        task=name,
        index=index,
        before=draft.before,
        context=draft.context(units) + draft.rest(units)[:characters],
        after=draft.after,
        prefix=draft.prefix,
        cut="never",
        answers=draft.answers,
        answer_tokens=TASKS[name].answer_tokens,
        source=f"ruler {name} {index}",
    )


def _least(prompt_tokens: int) -> int:
    return prompt_tokens - prompt_tokens // TOLERANCE
