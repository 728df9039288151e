"""Go over the requests of a trace: in turn, resumable, and past those that fail."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from coverage_lab.bench.machine import describe
from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.errors import CoverageLabError
from coverage_lab.replay.journal import Journal
from coverage_lab.trace import Trace

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes
    ----------
    records : list of dict
        Those of every request; each says `request_id`, `task`, `prompt_tokens` and `degenerate` first.
    failed : dict of str to str
        Requests that failed, and why; they are tried again when the run goes on.
    empty : int
        Requests that were recorded without a decode step.
    """

    records: list[dict[str, Any]]
    failed: dict[str, str]
    empty: int

    @property
    def degenerate(self) -> list[str]:
        """Requests whose dense answer keeps saying the same."""
        return sorted({record["request_id"] for record in self.records if record["degenerate"]})


def load_traced_model(trace: Trace, name: str | None = None, device: str | None = None) -> LoadedModel:
    """Return the model that a trace was recorded with.

    Parameters
    ----------
    trace : Trace
    name : str, optional
        Where the model is now, if not where it was.
    device : str, optional

    Raises
    ------
    CoverageLabError
        If it has other weights.
    """
    recorded = trace.manifest["run"]["model"]
    loaded = load_model(name or recorded["model"], recorded["dtype"], device)
    if loaded.identity["weights"] != recorded["weights"]:
        raise CoverageLabError(
            f"the weights of {name or recorded['model']} are not those that {trace.path} was recorded with; "
            "give the right one with --model"
        )
    geometry = loaded.geometry()
    for part, held in trace.geometry.items():
        # As it is after JSON, where a tuple is a list.
        if part in geometry and json.loads(json.dumps(geometry[part])) != held:
            raise CoverageLabError(
                f"{trace.path} was recorded with other {part} than {name or recorded['model']} has; "
                "give the right model with --model, or restore the manifest"
            )
    return loaded


def provenance(trace: Trace, loaded: LoadedModel, **asked: int | None) -> dict[str, Any]:
    """Return what figures come from: the trace, the model, the device and versions, as a JSON object.

    `asked` is what was asked for beside: how many requests and steps, the seed.
    """
    run = trace.manifest["run"]
    return {
        "model": dict(loaded.identity),
        "trace": {
            **{name: run.get(name) for name in ("page_size", "decode", "steps", "max_prompt_tokens")},
            "dataset": run["dataset"]["name"],
            "manifest": _identity(trace, loaded)["trace"],
        },
        "asked": asked,
        "machine": describe(loaded.model.device),
    }


def over_requests(
    trace: Trace,
    loaded: LoadedModel,
    work: Callable[[dict[str, Any], Callable[[], None]], list[dict[str, Any]]],
    *,
    run: dict[str, Any],
    runs: int,
    limit: int | None = None,
    steps: int | None = None,
    output: Path | None = None,
    progress: Progress = lambda request, done, all_: None,
) -> Outcome:
    """Do the same work on the requests of a trace that have a decode step, of all tasks in turn.

    Parameters
    ----------
    trace : Trace
    loaded : LoadedModel
    work : callable
        Takes a line of the requests table, its `decoded_ids` cut to `steps`, and a function to call after
        each of its runs; returns records.
    run : dict
        What decides the records, beside the trace, the model and `steps`.
    runs : int
        Runs of one request.
    limit, steps : int, optional
        At most so many requests, and steps of each.
    output : Path, optional
        A file that takes the records of each finished request; those that it has already are not run again.
    progress : callable
        Called with the request, runs done and runs in all, after every run.

    Raises
    ------
    CoverageLabError
        If no request has a decode step, or the file holds another run.
    """
    answered = trace.requests.filter((pl.col("status") == "ok") & (pl.col("decoded_ids").list.len() > 0))
    turn = pl.int_range(pl.len()).over("task", order_by="request_id")
    every = answered.sort(turn, "task", "request_id").to_dicts()
    requests = every[:limit]
    if not requests:
        raise CoverageLabError(
            f"{trace.path} has no request with a decode step; record one with --ignore-eos"
        )
    identity = {**_identity(trace, loaded), **run, "steps": steps}
    order = [line["request_id"] for line in every]
    journal = None if output is None else Journal(output, identity, order)
    # A reference that was fed is not what the dense model says.
    forced = trace.manifest["run"]["decode"] == "forced"
    records, failed = list[dict[str, Any]](), dict[str, str]()
    for place, line in enumerate(requests):
        name, done = line["request_id"], place * runs
        if journal is None or name not in journal.finished:

            def after(name: str = name) -> None:
                nonlocal done
                done += 1
                progress(name, done, runs * len(requests))

            common = {key: line[key] for key in ("request_id", "task", "prompt_tokens")}
            common["degenerate"] = not forced and is_degenerate(line["decoded_ids"])
            line["decoded_ids"] = line["decoded_ids"][:steps]
            try:
                found = [{**common, **record} for record in work(line, after)]
            except Exception as error:  # of the model, of Triton, of the device: the others go on
                failed[name] = " ".join(str(error).split())[:200] or type(error).__name__
            else:
                records += found
                if journal is not None:
                    journal.add(name, found)
        else:
            records += journal.finished[name]
        progress(name, (place + 1) * runs, runs * len(requests))
    recorded = trace.requests.filter(pl.col("status") == "ok")
    return Outcome(records, failed, len(recorded) - len(answered))


def _identity(trace: Trace, loaded: LoadedModel) -> dict[str, Any]:
    manifest = hashlib.sha256((trace.path / "manifest.json").read_bytes()).hexdigest()
    return {"trace": manifest[:16], **{key: loaded.identity[key] for key in ("weights", "dtype", "device")}}


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Return whether a dense answer of some length keeps saying the same: its figures then mean little.

    It does if a quarter of its tokens, or fewer, are distinct, or if nine in ten are what stood one period
    before, for a period that fits into it three times.
    """
    length = len(tokens)
    if length < 8:
        return False
    repeats = (
        sum(map(operator.eq, tokens[period:], tokens)) >= 0.9 * (length - period)
        for period in range(1, length // 3 + 1)
    )
    return len(set(tokens)) <= length // 4 or any(repeats)
