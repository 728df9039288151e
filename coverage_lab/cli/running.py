"""What verbs that take their time over a trace have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from coverage_lab.replay.requests import Outcome

# Seconds between two lines of progress in a log.
PAUSE = 10


@contextmanager
def running(
    quiet: bool, first: str = "loading the model", unit: str = "runs", stopped: str = ""
) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far the runs are: a line that changes on a terminal, else one every few seconds.

    `stopped` is said if the user stops them.
    """
    console = Console(stderr=True)
    with console.status(first) as status:
        if quiet:
            status.stop()
        said = time.monotonic()

        def progress(request: str, done: int, runs: int) -> None:
            nonlocal said
            text = f"{request}: {done} of {runs} {unit}"
            if quiet:
                return
            if console.is_terminal:
                status.update(text)
            elif time.monotonic() - said > PAUSE:
                console.print(text, highlight=False)
                said = time.monotonic()

        try:
            yield progress
        except BaseException as stop:
            if stopped and not isinstance(stop, Exception):
                status.stop()
                console.print(stopped, highlight=False, markup=False, soft_wrap=True)
            raise


def kept_in(path: Path | None) -> str:
    """Return what to say when runs are stopped whose finished requests are kept, if anywhere."""
    if path is None:
        return "stopped; nothing was kept: -o keeps finished requests"
    return f"stopped; the same command goes on from what is in {path}"


def finish(outcome: Outcome, quiet: bool) -> None:
    """Say which requests failed, or mean little, and exit with 1 if any failed."""
    console = Console(stderr=True)
    failed = [f"{name} failed: {error}" for name, error in outcome.failed.items()]
    for message in [*(() if quiet else remarks(outcome)), *failed]:
        console.print(message, highlight=False, markup=False, soft_wrap=True)
    if outcome.failed:
        raise typer.Exit(1)


def remarks(outcome: Outcome) -> list[str]:
    """Return what is to be said of requests whose figures mean little, or that have none."""
    found = []
    if outcome.degenerate:
        named = ", ".join(outcome.degenerate)
        found.append(f"the dense model says the same over and over in {named}: figures mean little there")
    if outcome.empty:
        found.append(f"requests without a decode step, left out: {outcome.empty}")
    return found
