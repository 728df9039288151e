"""Replay the requests of a trace and sum up what policies made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.evaluate import PoliciesOf
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.decoder import backend_for, check_policy
from coverage_lab.replay.replay import ListsFrom, replay_request
from coverage_lab.replay.requests import Outcome, Progress, over_requests
from coverage_lab.trace import Trace

# Every page kept: what is left of the divergence is numerical error.
CONTROL = "exact/coverage:1"


def replay(
    trace: Trace,
    loaded: LoadedModel,
    policies: Sequence[Policy] | PoliciesOf,
    *,
    lists: ListsFrom = "live",
    backend: str | None = None,
    check: bool = False,
    limit: int | None = None,
    steps: int | None = None,
    output: Path | None = None,
    progress: Progress = lambda request, done, all_: None,
) -> Outcome:
    """Replay the requests of a trace under policies, and under the control, which keeps every page.

    Parameters
    ----------
    trace : Trace
    loaded : LoadedModel
        Of `load_traced_model`.
    policies : sequence of Policy, or callable
        The policies, or a function from the place of a request in the trace to its policies (always as many,
        and told apart by the texts of the first request's).
    lists : {"live", "recorded"}
        Whose queries choose: those of the sparse run, or those of the dense one.
    backend : {"reference", "triton"}, optional
        What runs the policies; the kernels where they can by default.
    check : bool
        Whether to choose in plain torch too where the kernels do, and to count the rows that are alike.
    limit, steps : int, optional
        At most so many requests, of all tasks in turn, and steps of each.
    output : Path, optional
        A file that takes the records of each finished request; those that it has already are not run again.
    progress : callable
        Called with the request, runs done and runs in all, after every run.

    Raises
    ------
    CoverageLabError
        If a policy can't be run, or no request has a decode step.
    """
    policies_of = _with_control(policies)
    first = policies_of(0)
    labels = [str(policy) for policy in first]
    backends = []
    # What was asked for goes before the control, so that a message names it.
    for policy in reversed(first):
        check_policy(policy, loaded, trace.page_size)
        backends.append(backend_for(loaded, policy, trace.page_size, backend))
    if check and "triton" not in backends:
        raise CoverageLabError(
            "--check compares the kernels with plain torch, and no policy runs on the kernels here"
        )
    places = {shard.request_id: place for place, shard in enumerate(trace.shards)}
    has_reference = trace.manifest["run"]["decode"] == "forced"
    # Requests of even and odd places may have profiles of their own.
    described = [[policy.to_json() for policy in policies_of(part)] for part in (0, 1)]

    def work(line: dict[str, Any], done: Callable[[], None]) -> list[dict[str, Any]]:
        found = replay_request(
            loaded,
            line["prompt_ids"],
            line["decoded_ids"],
            policies_of(places[line["request_id"]]),
            trace.page_size,
            lists,
            backend=backend,
            check=check,
            done=done,
        )
        records = [{"policy": label, **one.record()} for label, one in zip(labels, found, strict=True)]
        # The likelihood of the model's own answer says little.
        return records if has_reference else [record | {"nll_mean": None} for record in records]

    return over_requests(
        trace,
        loaded,
        work,
        run={
            "policies": described[0] if described[0] == described[1] else described,
            "lists": lists,
            "backend": backend,
            "check": check,
        },
        runs=len(labels) + 1,
        limit=limit,
        steps=steps,
        output=output,
        progress=progress,
    )


def _with_control(policies: Sequence[Policy] | PoliciesOf) -> PoliciesOf:
    """Put the control first, and leave out what is given twice."""
    given: PoliciesOf = policies if callable(policies) else lambda place: policies
    # Texts and their places; a later policy of the same text takes the place of none.
    places = {text: place for place, text in reversed(list(enumerate(map(str, given(0)))))}
    places.pop(CONTROL, None)
    chosen = sorted(places.values())

    def policies_of(place: int) -> Sequence[Policy]:
        asked = given(place)
        return [parse_policy(CONTROL), *(asked[index] for index in chosen)]

    return policies_of


def summarize(records: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return a line for every policy; intervals resample requests.

    `kl_mean`, `kl_p99` and `agreement` are over all steps; `reads` is the pages kept over those seen,
    `reads_metadata` what the choice read besides over what dense attention reads, `pages_over_oracle` the
    pages kept over those of C*(0.95); `coverage_mean` is a mean over the rows of every step, and
    `rows_below` the part of them that keeps less than 0.95. `perplexity` is that of the references, where
    they were fed. `vs_first` is the mean divergence less that of the first policy after the control, with
    its paired interval, and `lower` the share of requests where it is lower.
    """
    lines: list[dict[str, Any]] = []
    first: dict[str, float] | None = None
    for policy in dict.fromkeys(record["policy"] for record in records):
        own = [record for record in records if record["policy"] == policy]
        steps = _column(own, "steps")
        divergence = _column(own, "kl_mean") * steps
        kept, pages = _column(own, "kept"), _column(own, "pages")
        low, high = ratio_interval(divergence, steps, seed)
        requests = [record["request_id"] for record in own]
        if first is None and policy != CONTROL:
            first = dict(zip(requests, divergence.tolist(), strict=True))
        beyond = divergence - [np.nan if first is None else first[name] for name in requests]
        paired = ratio_interval(beyond, steps, seed)
        likely = _column(own, "nll_mean") * steps
        line = {
            "policy": policy,
            "requests": len(own),
            "steps": int(steps.sum()),
            "reads": float(kept.sum() / pages.sum()),
            "reads_metadata": float(np.average(_column(own, "reads_metadata"), weights=pages)),
            "pages_over_oracle": float(kept.sum() / _column(own, "oracle_pages").sum()),
            "kl_mean": float(divergence.sum() / steps.sum()),
            "ci_low": low,
            "ci_high": high,
            "vs_first": float(beyond.sum() / steps.sum()),
            "vs_first_low": paired[0],
            "vs_first_high": paired[1],
            "lower": float(np.mean(np.where(np.isnan(beyond), np.nan, beyond < 0))),
            "kl_p99": float(np.quantile(np.concatenate([record["kl"] for record in own]), 0.99)),
            "agreement": float(np.average(_column(own, "agreement"), weights=steps)),
            "perplexity": float(np.exp(np.nansum(likely) / steps[np.isfinite(likely)].sum()))
            if np.isfinite(likely).any()
            else None,
            "coverage_mean": float(np.average(_column(own, "coverage_mean"), weights=steps)),
            "rows_below": float(np.average(_column(own, "rows_below"), weights=steps)),
            "backend": own[0]["backend"],
        }
        if "checked_rows" in own[0]:
            line["equal_rows"] = float(_column(own, "equal_rows").sum() / _column(own, "checked_rows").sum())
        lines.append(line)
    return lines


def _column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """Return one figure of records, NaN where there is none."""
    return np.array([record[name] for record in records], float)
