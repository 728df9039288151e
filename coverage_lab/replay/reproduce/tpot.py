"""Time per output token, dense and under the coverage rule, with CUDA graphs (paper 5.5.4, Table 3).

Two models: the trace's own, on its prompts, and one of the shape of Llama-3.1-8B with random weights and
keys, whose rows keep as large a share of their pages as rows of the trace do at the same depth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from coverage_lab.analyses import Finding
from coverage_lab.collectors.attention import fresh_cache, refill
from coverage_lab.collectors.models import LoadedModel, random_llama
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.evaluate import needed_columns, policy_counts
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.graph import WARM_UPS, CapturedStep
from coverage_lab.replay.kernel import EveryPage, KernelAttention, selects, why_not
from coverage_lab.replay.reproduce import Report, Settings
from coverage_lab.trace import Trace

POLICY = "mvar/coverage:0.98"
BATCH = 8
SHORTEST = 2048
# Steps of a timing, timings of an arm; the arms take turns.
STEPS, ROUNDS = 16, 5
SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
# Tokens x batch of Table 3; on Llama-3.1-8B in vLLM: dense FA3, the coverage rule, ms, and their ratio.
PAPER_8B = {
    (8192, 32): (12.66, 9.18, 1.38),
    (32768, 16): (16.46, 8.71, 1.89),
    (65536, 8): (19.56, 7.45, 2.62),
}
SDPA, EVERY, RULE = "dense, SDPA", "dense, every page on the kernels", POLICY
# Nats from SDPA that rounding explains, where every page is read. What the rule costs is the model's affair.
MOST_APART = 0.02


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """Time both models on a GPU; `settings.limit` and `steps` do not matter."""
    device = loaded.model.device
    if device.type != "cuda":
        raise CoverageLabError("times per token need a GPU: decode steps are captured in CUDA graphs")
    reason = why_not(loaded, parse_policy(POLICY), trace.page_size)
    if reason:
        raise CoverageLabError(f"the kernels can't run {POLICY} here: {reason}")
    shares = kept_shares(trace)
    findings, lines = list[Finding](), list[dict[str, Any]]()
    room = STEPS + WARM_UPS
    longest = (loaded.max_tokens or 32768) - room
    lengths = [SHORTEST << power for power in range(20) if SHORTEST << power <= longest]
    if lengths and longest > 1.2 * lengths[-1]:
        lengths.append(longest)
    name = loaded.identity["model"]
    for place, tokens in enumerate(lengths):
        settings.progress(f"{name}, {tokens} tokens", place, len(lengths))
        prompts = _prompts(trace, tokens)
        timed = _time(loaded.model, trace.page_size, BATCH, tokens, _read(loaded, prompts))
        findings += _findings(f"{name}, {tokens} tokens x {BATCH}", timed, None)
        lines += _lines(name, tokens, BATCH, timed)
    model = random_llama(device, SHAPE_8B)
    for place, ((tokens, batch), paper) in enumerate(PAPER_8B.items()):
        settings.progress(f"8B shape, {tokens} tokens", place, len(PAPER_8B))
        counts = _counts_like(shares, batch, -(-tokens // trace.page_size), device, settings.seed)
        timed = _time(model, trace.page_size, batch, tokens, _random_keys(batch, tokens, device), counts)
        findings += _findings(f"8B shape, {tokens} tokens x {batch}", timed, paper)
        lines += _lines("8B shape", tokens, batch, timed)
    return Report("Time per output token, ms", findings, lines=lines)


@dataclass(frozen=True)
class Timed:
    """Medians of an arm.

    Attributes
    ----------
    ms : float
        A token.
    reads : float
        Pages kept over pages seen.
    kl : float
        Of the first timed step's next tokens to those of SDPA, mean over the batch, nats.
    """

    ms: float
    reads: float
    kl: float


def _time(
    model: Any,
    page_size: int,
    batch: int,
    tokens: int,
    source: Any,
    counts: Mapping[int, Tensor] | None = None,
) -> dict[str, Timed]:
    """Return the median time of a step of every arm; the arms share a cache, and take turns."""
    device, room = model.device, tokens + STEPS + WARM_UPS
    with torch.inference_mode():
        cache = fresh_cache(model, room)
        lengths = torch.ones(batch, dtype=torch.int32, device=device)
        policy = parse_policy(POLICY)
        rule = KernelAttention(policy, page_size, lengths, counts=counts)
        arms: dict[str, KernelAttention | EveryPage | None]
        arms = {SDPA: None, EVERY: EveryPage(page_size, lengths), RULE: rule}
        steps = {}
        for name, kernels in arms.items():
            refill(cache, source, 1)
            lengths.fill_(1)
            steps[name] = CapturedStep(model, cache, kernels, lengths, room)
        times: dict[str, list[float]] = {name: [] for name in arms}
        said: dict[str, Tensor] = {}
        for _ in range(ROUNDS):
            for name, kernels in arms.items():
                refill(cache, source, tokens)
                lengths.fill_(tokens)
                if kernels is not None:
                    kernels.begin()
                steps[name].begin(tokens)
                fed = torch.ones(batch, 1, dtype=torch.long, device=device)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                said[name] = steps[name](fed)
                start.record()
                for _ in range(STEPS):
                    fed = steps[name](fed).argmax(-1, keepdim=True)
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / STEPS)
        kept, seen = rule.reads.tolist()
    apart = check(said)
    return {
        name: Timed(statistics.median(found), kept / seen if name == RULE else 1.0, apart[name])
        for name, found in times.items()
    }


def check(said: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the divergence of every arm's next tokens from those of SDPA; times of wrong arms are no times.

    Parameters
    ----------
    said : mapping of str to Tensor
        Logits `[B, vocabulary]` of each arm, of the same step.

    Raises
    ------
    CoverageLabError
        If the kernels say something else than dense attention where they read every page, or the rule says
        no number.
    """
    dense = said[SDPA].double().log_softmax(-1)
    apart = {
        name: float(kl_div(logits.double().log_softmax(-1), dense, reduction="batchmean", log_target=True))
        for name, logits in said.items()
    }
    for name, most in ((EVERY, MOST_APART), (RULE, math.inf)):
        if not apart[name] <= most:
            raise CoverageLabError(
                f"{name} is {apart[name]:.3g} nats from dense SDPA: a fault of the kernels"
            )
    return apart


def _findings(what: str, timed: dict[str, Timed], paper: tuple[float, float, float] | None) -> list[Finding]:
    dense, rule, ratio = paper or (None, None, None)
    ours = timed[RULE]
    of = {SDPA: None, EVERY: dense, RULE: rule}
    return [
        *(
            Finding(
                f"{what}: {name}",
                timed[name].ms,
                of[name],
                unit="ms",
                note="the paper's dense is FA3 in vLLM" if of[name] and name == EVERY else "",
            )
            for name in timed
        ),
        *(
            Finding(
                f"  {what}: {name} over the rule",
                timed[name].ms / ours.ms,
                ratio if name == EVERY else None,
                note=f"the rule reads {ours.reads:.1%}, {ours.kl:.2g} nats from SDPA",
            )
            for name in (SDPA, EVERY)
        ),
    ]


def _lines(model: str, tokens: int, batch: int, timed: dict[str, Timed]) -> list[dict[str, Any]]:
    shape = {"model": model, "tokens": tokens, "batch": batch}
    return [
        {**shape, "arm": name, "ms": found.ms, "reads": found.reads, "kl": found.kl}
        for name, found in timed.items()
    ]


def kept_shares(trace: Trace) -> list[np.ndarray]:
    """Return the shares of their pages that rows of the trace keep, by layer, in order."""
    policy = parse_policy(POLICY)
    assert selects(policy)
    trace.require(needed_columns([policy], trace))
    layers: dict[int, list[np.ndarray]] = {}
    for _, layer, _, pages, kept in policy_counts(trace, [policy]):
        for number in np.unique(layer):
            own = layer == number
            layers.setdefault(int(number), []).append(kept[own, 0] / pages[own])
    return [np.concatenate(layers[number]) for number in sorted(layers)]


def _counts_like(
    shares: Sequence[np.ndarray], batch: int, pages: int, device: torch.device, seed: int
) -> dict[int, Tensor]:
    """Return page counts `[batch, KV heads]` by layer: of rows drawn at the same depth of the trace."""
    generator = np.random.default_rng(seed)
    layers, heads = SHAPE_8B["num_hidden_layers"], SHAPE_8B["num_key_value_heads"]
    counts = {}
    for layer in range(layers):
        drawn = generator.choice(shares[layer * len(shares) // layers], (batch, heads))
        whole = np.maximum(1, np.rint(drawn * pages)).astype(np.int64)
        counts[layer] = torch.from_numpy(whole).to(device)
    return counts


def _prompts(trace: Trace, tokens: int) -> list[list[int]]:
    """Return a batch of prompts of one length: the trace's own, end to end."""
    stream = [token for prompt in trace.requests["prompt_ids"].to_list() for token in prompt or []]
    repeated = stream * (1 + BATCH * tokens // len(stream))
    return [repeated[place * tokens : (place + 1) * tokens] for place in range(BATCH)]


@torch.inference_mode()
def _read(loaded: LoadedModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a cache that holds prompts, which are read dense, one after the other."""
    model = loaded.model
    parts = []
    for prompt in prompts:
        cache = fresh_cache(model)
        ids = torch.tensor([list(prompt)], device=model.device)
        model(ids, use_cache=True, logits_to_keep=1, **cache)
        parts.append(next(iter(cache.values())))
    layers = [
        SimpleNamespace(
            keys=torch.cat([part.layers[index].keys for part in parts]),
            values=torch.cat([part.layers[index].values for part in parts]),
        )
        for index in range(len(parts[0].layers))
    ]
    return {"": SimpleNamespace(layers=layers)}


def _random_keys(batch: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return a cache of random keys and values, made when they are asked for: the same ones every time."""
    shape = batch, SHAPE_8B["num_key_value_heads"], tokens, SHAPE_8B["head_dim"]

    class Layer:
        def __init__(self, seed: int) -> None:
            self._seed = seed

        @property
        def keys(self) -> Tensor:
            return self._drawn(2 * self._seed)

        @property
        def values(self) -> Tensor:
            return self._drawn(2 * self._seed + 1)

        def _drawn(self, seed: int) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    return {"": SimpleNamespace(layers=[Layer(index) for index in range(SHAPE_8B["num_hidden_layers"])])}
