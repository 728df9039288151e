"""Why a policy moves the answer: which KV heads carry the divergence, and what is at fault there.

The divergence of a KV head is that of a run in which it alone follows the policy. Other runs put the exact
ranking, or the exact counts, in place of the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coverage_lab.bootstrap import ratio_interval
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import take
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.choice import Rule, Selector, choose, shared
from coverage_lab.replay.decoder import check_policy
from coverage_lab.replay.replay import PreparedRequest
from coverage_lab.replay.requests import Outcome, Progress, over_requests
from coverage_lab.trace import Trace

# Heads that one run reads whole, to see what is left.
WORST = 3
AS_IS, NOTHING_DROPPED = "as it is", "every page"


def explain(
    trace: Trace,
    loaded: LoadedModel,
    policy: Policy,
    *,
    heads: bool = True,
    limit: int | None = None,
    steps: int | None = None,
    output: Path | None = None,
    progress: Progress = lambda request, done, all_: None,
) -> Outcome:
    """Take a policy apart on the requests of a trace, in plain torch.

    Parameters
    ----------
    trace : Trace
    loaded : LoadedModel
        Of `load_traced_model`.
    policy : Policy
        With a list for every KV head or layer.
    heads : bool
        Whether to run every KV head alone, which takes most of the time.
    limit, steps, output, progress
        See `over_requests`.

    Returns
    -------
    Outcome
        Records have `what`, `heads` or `variants`. Of heads: `layer`, `kv_head`, `kl` (it alone follows the
        policy), and of the run in which all heads follow: `log_error` (log of estimated over exact mass of
        the pages that are estimated, mean over steps and query heads), `kept`, `pages`, `coverage_mean` and
        `coverage_low` (the lowest) of its rows. Of variants: `variant`, `kl`, `kept`, `pages`,
        `coverage_mean`. All have `steps`.

    Raises
    ------
    CoverageLabError
        If the policy has lists for query heads or candidates of another, or the trace has no request with a
        decode step.
    """
    if policy.granularity == "query_head":
        raise CoverageLabError(f"policy {policy}: query heads share what is read; leave out @query_head")
    if policy.within is not None:
        raise CoverageLabError(
            f"policy {policy}: candidates are not taken apart; explain it without what stands after within"
        )
    check_policy(policy, loaded, trace.page_size)
    rows = [(layer.layer, head) for layer in loaded.layers for head in range(layer.kv_heads)]
    variants = _variants(policy)

    def work(line: dict[str, Any], done: Callable[[], None]) -> list[dict[str, Any]]:
        selector = Selector(policy, trace.page_size, loaded.model.dtype)
        request = PreparedRequest(loaded, line["prompt_ids"], line["decoded_ids"], [selector])
        request.decode_dense()
        records = []

        def run(rule: Rule, **names: Any) -> dict[str, Any]:
            found = request.decode(selector.fork(rule))
            done()
            figures = {
                "steps": len(found.kl),
                "kl": float(found.kl.mean()),
                "kept": found.counts["kept"],
                "pages": found.counts["pages"],
                "coverage_mean": float(found.realised.mean()),
            }
            return {**names, **figures}

        watch = Watch(policy)
        for name, rule in variants.items():
            records.append(run(watch if name == AS_IS else rule, what="variants", variant=name))
        if heads:
            alone = [
                {**run(only(policy, *row), what="heads", layer=row[0], kv_head=row[1]), **watch.of(*row)}
                for row in rows
            ]
            worst = sorted(alone, key=lambda record: -record["kl"])[:WORST]
            spared = {(record["layer"], record["kv_head"]) for record in worst}
            rule = without(policy, spared)
            records.append(run(rule, what="variants", variant=f"{WORST} worst heads whole"))
            records += alone
        return records

    return over_requests(
        trace,
        loaded,
        work,
        run={"explain": policy.to_json(), "heads": heads},
        runs=len(variants) + (len(rows) + 1 if heads else 0),
        limit=limit,
        steps=steps,
        output=output,
        progress=progress,
    )


def _variants(policy: Policy) -> dict[str, Rule]:
    """What is run for every request, and what it keeps."""

    def own(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        return choose(policy, estimate, rows, layer)

    def nothing_dropped(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        return rows.valid(estimate.shape[-1])

    def exact_ranking(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        ranking = policy.budget.rank(*shared(policy, exact, rows))
        return take(ranking, choose(policy, estimate, rows, layer).sum(1))

    def exact_counts(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        ranking = policy.budget.rank(*shared(policy, estimate, rows))
        return take(ranking, choose(policy, exact, rows, layer).sum(1))

    def exact_shares(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        return choose(policy, exact, rows, layer)

    found: dict[str, Rule] = {NOTHING_DROPPED: nothing_dropped, AS_IS: own}
    if policy.budget.reads_shares and policy.estimator.name != "exact":
        found |= {
            "exact ranking, own counts": exact_ranking,
            "own ranking, exact counts": exact_counts,
            "exact shares": exact_shares,
        }
    return found


def only(policy: Policy, wanted: int, kv_head: int) -> Rule:
    """Return the rule under which one KV head alone, of layer `wanted`, follows the policy."""

    def rule(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        every = rows.valid(estimate.shape[-1])
        if layer != wanted:
            return every
        return choose(policy, estimate, rows, layer).where((rows.kv_head == kv_head)[:, None], every)

    return rule


def without(policy: Policy, heads: set[tuple[int, int]]) -> Rule:
    """Return the rule under which all but some (layer, KV head) follow the policy."""

    def rule(exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        kept = choose(policy, estimate, rows, layer)
        for spared, kv_head in heads:
            if spared == layer:
                kept |= rows.valid(kept.shape[1]) & (rows.kv_head == kv_head)[:, None]
        return kept

    return rule


class Watch:
    """The policy's own rule, with notes on every row that it decides."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seen: dict[int, list[Tensor]] = {}

    def __call__(self, exact: Tensor, estimate: Tensor, rows: Rows, layer: int) -> Tensor:
        kept = choose(self._policy, estimate, rows, layer)
        covered = group_shares(exact).where(kept, 0).sum(-1)
        error = log_error(exact, estimate, rows)
        notes = torch.stack(
            [part.float() for part in (rows.kv_head, error, covered, kept.sum(-1), rows.n_pages)]
        )
        self._seen.setdefault(layer, []).append(notes)
        return kept

    def of(self, layer: int, kv_head: int) -> dict[str, Any]:
        """Return the notes on one KV head."""
        notes = torch.cat(self._seen[layer], 1)
        error, covered, kept, pages = notes[1:, notes[0] == kv_head]
        known = error.isfinite()
        return {
            "log_error": float(error[known].mean()) if known.any() else None,
            "coverage_mean": float(covered.mean()),
            "coverage_low": float(covered.min()),
            "kept": int(kept.sum()),
            "pages": int(pages.sum()),
        }


def log_error(exact: Tensor, estimate: Tensor, rows: Rows) -> Tensor:
    """Return the log of estimated over exact mass of the pages that are estimated, `[rows]`.

    Masses `[rows, G, P]` are summed over pages, and the logs averaged over query heads; NaN where every page
    is known exactly.
    """
    width = exact.shape[-1]
    inside = (rows.valid(width) & ~rows.forced(width))[:, None]
    found, wanted = (masses.masked_fill(~inside, -torch.inf).logsumexp(-1) for masses in (estimate, exact))
    return (found - wanted).mean(-1)


def summarize(records: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return the variants, then the KV heads by falling divergence; intervals resample requests.

    `share` is the divergence of a head over the sum of all heads', both less that of the run that drops
    nothing, which is numerical error. `log_error` is a mean over requests.
    """
    lines: list[dict[str, Any]] = []
    for what, names in (("variants", ("variant",)), ("heads", ("layer", "kv_head"))):
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for record in records:
            if record["what"] == what:
                groups.setdefault(tuple(record[name] for name in names), []).append(record)
        found = [_line(what, dict(zip(names, key, strict=True)), own, seed) for key, own in groups.items()]
        if what == "heads":
            floor = next((line["kl"] for line in lines if line["variant"] == NOTHING_DROPPED), 0.0)
            above = [max(line["kl"] - floor, 0.0) for line in found]
            total = sum(above)
            found = [
                line | {"share": own / total if total else 0.0}
                for line, own in zip(found, above, strict=True)
            ]
            found.sort(key=lambda line: -line["kl"])
        lines += found
    return lines


def _line(what: str, names: dict[str, Any], own: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    steps = np.array([record["steps"] for record in own], float)
    divergence = np.array([record["kl"] for record in own]) * steps
    low, high = ratio_interval(divergence, steps, seed)
    line = {
        "what": what,
        **names,
        "requests": len(own),
        "kl": float(divergence.sum() / steps.sum()),
        "ci_low": low,
        "ci_high": high,
        "coverage_mean": float(np.average([record["coverage_mean"] for record in own], weights=steps)),
    }
    kept, pages = (sum(record[name] for record in own) for name in ("kept", "pages"))
    line["reads"] = kept / pages
    if what == "variants":
        return line
    errors = [record["log_error"] for record in own if record["log_error"] is not None]
    return line | {
        "log_error": float(np.mean(errors)) if errors else None,
        "coverage_low": min(record["coverage_low"] for record in own),
    }
