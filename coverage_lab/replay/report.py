"""Replay the requests of a trace and sum up what policies made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.compare import metadata_reads
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.journal import Journal
from coverage_lab.replay.replay import ListsFrom, replay_request
from coverage_lab.trace import Trace

# Every page kept: what is left of the divergence is numerical error.
CONTROL = "exact/coverage:1"


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
    return loaded


def replay(
    trace: Trace,
    loaded: LoadedModel,
    policies: Sequence[Policy],
    *,
    lists: ListsFrom = "live",
    limit: int | None = None,
    steps: int | None = None,
    output: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda request, done, all_: None,
) -> list[dict[str, Any]]:
    """Return a record for every request and policy, the control first.

    Parameters
    ----------
    trace : Trace
    loaded : LoadedModel
        Of `load_traced_model`.
    policies : sequence of Policy
        Those that are given and the control, which keeps every page.
    lists : {"live", "recorded"}
        Whose queries choose: those of the sparse run, or those of the dense one.
    limit, steps : int, optional
        At most so many requests, and steps of each.
    output : Path, optional
        A file that takes the records of each finished request; those that it has already are not run again.
    progress : callable
        Called with the request, runs done and runs in all, after every run.
    """
    asked = [parse_policy(CONTROL), *(policy for policy in policies if str(policy) != CONTROL)]
    requests = [
        line
        for line in trace.requests.sort("request_id").to_dicts()
        if line["status"] == "ok" and line["decoded_ids"]
    ][:limit]
    if not requests:
        raise CoverageLabError(
            f"{trace.path} has no request with a decode step; record one with --ignore-eos"
        )
    journal = None if output is None else Journal(output, _identity(trace, loaded, asked, lists, steps))
    records, done, runs = [], 0, len(requests) * (len(asked) + 1)
    for line in requests:
        if journal is not None and line["request_id"] in journal.finished:
            records += journal.finished[line["request_id"]]
            done += len(asked) + 1
            progress(line["request_id"], done, runs)
            continue

        def step(name: str = line["request_id"]) -> None:
            nonlocal done
            done += 1
            progress(name, done, runs)

        fed = line["decoded_ids"][:steps]
        try:
            found = replay_request(loaded, line["prompt_ids"], fed, asked, trace.page_size, lists, step)
        except torch.OutOfMemoryError:
            raise CoverageLabError(
                f"out of memory at {line['request_id']} ({line['prompt_tokens']} prompt tokens)"
            ) from None
        own = [
            {
                "request_id": line["request_id"],
                "prompt_tokens": line["prompt_tokens"],
                "policy": str(policy),
                "reads_metadata": metadata_reads(policy, trace),
                "degenerate": is_degenerate(fed),
                **one.record(),
            }
            for policy, one in zip(asked, found, strict=True)
        ]
        if journal is not None:
            journal.add(line["request_id"], own)
        records += own
    return records


def _identity(
    trace: Trace, loaded: LoadedModel, policies: Sequence[Policy], lists: str, steps: int | None
) -> dict[str, Any]:
    """Return what decides the records of a request."""
    manifest = hashlib.sha256((trace.path / "manifest.json").read_bytes()).hexdigest()
    return {
        "trace": manifest[:16],
        "weights": loaded.identity["weights"],
        "dtype": loaded.identity["dtype"],
        "device": loaded.identity["device"],
        "policies": [str(policy) for policy in policies],
        "lists": lists,
        "steps": steps,
    }


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Return whether a dense answer of some length keeps saying the same: its figures then mean little."""
    return len(tokens) >= 8 and len(set(tokens)) <= len(tokens) // 4


def summarize(records: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return a line for every policy; intervals resample requests.

    `kl_mean` and `agreement` are means over steps, `kl_p99` the largest p99 of a request, `reads` the pages
    kept over those seen, `pages_over_oracle` over those of C*(0.95); `coverage_mean` is a mean over the rows
    of every step. `vs_first` is the mean divergence less that of the first policy after the control, with
    its paired interval, and `lower` the share of requests on which it is lower.
    """
    lines: list[dict[str, Any]] = []
    first: np.ndarray | None = None
    for policy in dict.fromkeys(record["policy"] for record in records):
        own = [record for record in records if record["policy"] == policy]
        steps = np.array([record["steps"] for record in own], float)
        divergence = np.array([record["kl_mean"] for record in own]) * steps
        kept, pages, oracle, covered = (
            np.array([record[name] for record in own], float)
            for name in ("kept", "pages", "oracle_pages", "coverage_mean")
        )
        low, high = ratio_interval(divergence, steps, seed)
        if first is None and policy != CONTROL:
            first = divergence
        beyond = np.full_like(divergence, np.nan) if first is None else divergence - first
        paired = ratio_interval(beyond, steps, seed)
        lines.append(
            {
                "policy": policy,
                "requests": len(own),
                "steps": int(steps.sum()),
                "reads": float(kept.sum() / pages.sum()),
                "reads_metadata": own[0]["reads_metadata"],
                "pages_over_oracle": float(kept.sum() / oracle.sum()),
                "kl_mean": float(divergence.sum() / steps.sum()),
                "ci_low": low,
                "ci_high": high,
                "vs_first": float(beyond.sum() / steps.sum()),
                "vs_first_low": paired[0],
                "vs_first_high": paired[1],
                "lower": float(np.mean(beyond < 0)),
                "kl_p99": max(record["kl_p99"] for record in own),
                "agreement": float(np.average([record["agreement"] for record in own], weights=steps)),
                "coverage_mean": float(np.average(covered, weights=steps)),
            }
        )
    return lines
