"""Check that a data set can be recorded and scored, before a run needs it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from coverage_lab.collectors.datasets import Counter, Dataset, Example
from coverage_lab.errors import CoverageLabError


@dataclass
class TaskReport:
    """What was found in one task.

    Attributes
    ----------
    task : str
    prompts : int
        Prompts that could be read.
    answered : int
        Those with reference answers.
    shortest, longest : int or None
        Tokens of their prompts, where there is a tokenizer.
    faults : list of str
        What is wrong, and where.
    """

    task: str
    prompts: int = 0
    answered: int = 0
    shortest: int | None = None
    longest: int | None = None
    faults: list[str] = field(default_factory=list)

    def add(self, example: Example, tokens: int | None, fault: str | None) -> None:
        """Count a prompt."""
        self.prompts += 1
        self.answered += bool(example.answers)
        if tokens is not None:
            self.shortest = min(tokens, self.shortest or tokens)
            self.longest = max(tokens, self.longest or tokens)
        if fault:
            self.faults.append(f"{example.source or f'{example.task}/{example.index}'}: {fault}")


def validate(
    dataset: Dataset, prompt_tokens: int, steps: int, count: Counter | None = None
) -> Iterator[TaskReport]:
    """Read every prompt of a data set, and report on each task.

    A row that can't be read ends its file, and the other files are read all the same.

    Parameters
    ----------
    dataset : Dataset
    prompt_tokens, steps : int
        As for `examples`.
    count : callable, optional
        Tokens of a prompt.

    Raises
    ------
    CoverageLabError
        If an option is at fault, or there is nothing to read.
    """
    dataset.examples(prompt_tokens, steps)  # what is wrong before the first row is no fault of a task
    parts = [replace(dataset, tasks=(task,)) for task in dataset.readable()] or [dataset]
    for part in parts:
        reports: dict[str, TaskReport] = {}
        fault: str | None = None
        try:
            for example in part.examples(prompt_tokens, steps):
                tokens = _length(example, count, prompt_tokens)
                report = reports.setdefault(example.task, TaskReport(example.task))
                report.add(example, tokens, part.check(example, prompt_tokens, tokens))
        except CoverageLabError as error:
            fault = str(error)
        if fault:
            name = part.tasks[0] if part is not dataset else dataset.name
            reports.setdefault(name, TaskReport(name)).faults.append(fault)
        yield from reports.values()


def _length(example: Example, count: Counter | None, prompt_tokens: int) -> int | None:
    """Return the tokens of a prompt, cut where it may be cut."""
    if count is None:
        return None
    tokens = count(example)
    return min(tokens, prompt_tokens) if prompt_tokens and example.cut != "never" else tokens
