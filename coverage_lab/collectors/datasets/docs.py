"""Long documents that every Python brings along: its own language reference."""

import hashlib
import importlib
import platform
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from coverage_lab.collectors.datasets import Dataset, Example, register
from coverage_lab.collectors.reading import pick_tasks
from coverage_lab.errors import CoverageLabError

TASK = "topics"
DEFAULT_DOCUMENTS = 8
DEFAULT_PROMPT_TOKENS = 4096
QUESTION = '\n\nQuestion: What does the text above say about "{}"? Answer in a few sentences.'

# Characters that one token stands for: more, about and less than tokenizers average on this text.
MOST_PER_TOKEN, USUAL_PER_TOKEN, LEAST_PER_TOKEN = 8, 4.3, 3


@register("docs")
@dataclass(frozen=True, kw_only=True)
class LanguageReference(Dataset):
    """Stretches of the Python language reference, each with a question about one of its topics.

    The topics stand in alphabetical order on a circle. Documents start at a topic, evenly spaced
    over the circle, and `seed` turns it. `limit` is the number of documents (8 by default).
    """

    task_names: ClassVar[tuple[str, ...]] = (TASK,)
    title: ClassVar[str] = "Python's language reference, from the standard library"

    def examples(self, prompt_tokens: int, steps: int) -> Iterator[Example]:
        if self.path is not None:
            raise CoverageLabError("the data set docs comes with Python; leave out --data-dir")
        pick_tasks(self.tasks, [TASK])
        topics = _topics()
        count = DEFAULT_DOCUMENTS if self.limit is None else self.limit
        if count > len(topics):
            raise CoverageLabError(f"docs has {len(topics)} places to start a document, not {count}")
        most = int(sum(map(len, topics.values())) / USUAL_PER_TOKEN)
        if prompt_tokens > most:
            raise CoverageLabError(
                f"docs holds about {most} tokens, less than the {prompt_tokens} asked for; "
                "lower --max-prompt-tokens"
            )
        return self._documents(topics, count, prompt_tokens)

    def default_prompt_tokens(self, room: int | None) -> int:
        return DEFAULT_PROMPT_TOKENS if room is None else min(room, DEFAULT_PROMPT_TOKENS)

    def describe(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "corpus_sha256": hashlib.sha256(corpus().encode()).hexdigest(),
        }

    def _documents(self, topics: dict[str, str], count: int, prompt_tokens: int) -> Iterator[Example]:
        names = list(topics)
        circle = "".join(topics.values())
        starts = _offsets(topics)
        turn = random.Random(self.seed).randrange(len(circle))
        length = MOST_PER_TOKEN * prompt_tokens
        free = set(range(len(names)))
        for index in range(count):
            target = (turn + index * len(circle) // count) % len(circle)
            first = min(free, key=lambda i: (_distance(starts[i], target, len(circle)), i))
            free.remove(first)
            start = starts[first]
            turns = 1 + (start + length) // len(circle)
            # The first half in tokens holds at least this many characters.
            topic = _last_within(topics, first, LEAST_PER_TOKEN * prompt_tokens // 2)
            yield Example(
                task=TASK,
                index=index,
                context=(circle * turns)[start : start + length],
                after=QUESTION.format(topic),
                cut="end",
                source=f"pydoc_data.topics:{names[first]}",
            )


def corpus() -> str:
    """Return the whole text."""
    return "".join(_topics().values())


def _topics() -> dict[str, str]:
    """Return each topic's text under a heading, by name in alphabetical order."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        raise CoverageLabError("this Python comes without pydoc_data, which docs reads") from None
    return {name: f"# {name}\n\n{text.strip()}\n\n" for name, text in sorted(module.topics.items())}


def _offsets(topics: dict[str, str]) -> list[int]:
    starts = [0]
    for text in topics.values():
        starts.append(starts[-1] + len(text))
    return starts[:-1]


def _distance(a: int, b: int, around: int) -> int:
    return min((a - b) % around, (b - a) % around)


def _last_within(topics: dict[str, str], first: int, characters: int) -> str:
    """Return the last topic, from `first` on, that ends within so many characters, else `first`."""
    names = list(topics)
    last, end = first, 0
    for i in range(first, first + len(names)):
        end += len(topics[names[i % len(names)]])
        if end > characters:
            break
        last = i
    return names[last % len(names)]
