"""How long work is shown: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class CollectProgress:
    """Reporter of `collect`: requests, decode steps a second and time left."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._loading = self._console.status("loading the model and the prompts")
        if not quiet and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests  {task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._console,
            )

    def begin(self, total: int, done: int, plan: str) -> None:
        self._start, self._total, self._before, self._done, self._steps = (
            time.perf_counter(),
            total,
            done,
            done,
            0,
        )
        if not self._quiet:
            self._console.print(plan, highlight=False, soft_wrap=True)
        if done and not self._quiet:
            self._console.print(f"{done} of {total} requests were done before; going on", highlight=False)
        self._loading.stop()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("collect", total=total, completed=done, rate="")

    def request(self, request: dict[str, Any], seconds: float) -> None:
        self._done += 1
        self._steps += request["steps"]
        elapsed = time.perf_counter() - self._start
        rate = f"{self._steps / elapsed:.1f} steps/s, prefill included"
        if self._bar:
            self._bar.update(self._task, completed=self._done, rate=rate)
            if request["error"]:
                self._bar.console.print(
                    f"{request['request_id']} failed: {request['error']}", highlight=False
                )
        elif not self._quiet:
            left = (self._total - self._done) * elapsed / (self._done - self._before)
            rest = f", about {_duration(left)} left" if self._done < self._total else ""
            what = request["error"] or f"{request['prompt_tokens']} tokens, {request['steps']} steps"
            self._console.print(
                f"[{self._done}/{self._total}] {request['request_id']}: {what}, {seconds:.1f} s "
                f"({rate}{rest})",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._loading.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loading.stop()
        if self._bar:
            self._bar.stop()


class PassProgress:
    """A bar for passes over a trace; nothing off a terminal."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
