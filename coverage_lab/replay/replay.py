"""Replay the recorded tokens of a request under policies, beside the dense model (paper 5.2 and 5.5.2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall, fresh_cache, observed_attention
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.sparse import SparseAttention

ListsFrom = Literal["live", "recorded"]


@dataclass(frozen=True)
class Replayed:
    """What a policy made of one request.

    Attributes
    ----------
    kl : Tensor
        `[steps]` float64: KL divergence of the policy's next-token distribution from the dense one, nats.
    agree : Tensor
        `[steps]` bool: whether the likeliest token is the same.
    kept, pages, oracle : int
        Pages kept, pages seen, and those of the oracle sets C*(0.95), over layers, KV heads and steps.
    realised : Tensor
        `[layers * steps, KV heads]`: exact share of the kept pages, of the queries that the policy's own
        run has.
    """

    kl: Tensor
    agree: Tensor
    kept: int
    pages: int
    oracle: int
    realised: Tensor

    def record(self) -> dict[str, Any]:
        """Return the figures of the request as plain numbers."""
        return {
            "steps": len(self.kl),
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(self.kl.quantile(0.99)),
            "agreement": float(self.agree.double().mean()),
            "kept": self.kept,
            "pages": self.pages,
            "oracle_pages": self.oracle,
            "reads": self.kept / self.pages,
            "coverage_mean": float(self.realised.mean()),
        }


@torch.inference_mode()
def replay_request(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    decoded_ids: Sequence[int],
    policies: Sequence[Policy],
    page_size: int,
    lists: ListsFrom = "live",
    done: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """Feed a request's recorded tokens to the model, dense and under every policy.

    Parameters
    ----------
    loaded : LoadedModel
    prompt_ids, decoded_ids : sequence of int
        The prompt, which is read dense, and the tokens that are fed one a step.
    policies : sequence of Policy
    page_size : int
        Tokens a page.
    lists : {"live", "recorded"}
        `live`: every step selects from the queries of the sparse run. `recorded`: the lists are those that
        the dense run's queries choose.
    done : callable
        Called after the dense run and after every policy.

    Returns
    -------
    list of Replayed
        One a policy.
    """
    model = loaded.model
    # All see the prompt and summarize it; where lists are recorded, the dense run's steps too.
    chosen = [SparseAttention(policy, page_size, attend=lists == "live") for policy in policies]
    cache = fresh_cache(model)
    everyone = Together(chosen)
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    with observed_attention(model, everyone):
        everyone.cached = len(prompt_ids)
        model(prompt, use_cache=True, logits_to_keep=1, **cache)
    dense = everyone if lists == "recorded" else Together([])
    wanted = _decode(loaded, copy.deepcopy(cache), len(prompt_ids), decoded_ids, dense)
    done()
    found = []
    for policy, attention in zip(policies, chosen, strict=True):
        if lists == "recorded":
            attention = SparseAttention(policy, page_size, lists=attention.lists)
        logits = _decode(loaded, copy.deepcopy(cache), len(prompt_ids), decoded_ids, Together([attention]))
        found.append(_compared(logits, wanted, attention))
        done()
    return found


class Together:
    """Several attentions that see the same calls; the output of the last one that has any counts."""

    def __init__(self, attentions: Sequence[SparseAttention]) -> None:
        self.attentions = list(attentions)
        self.cached = 0
        self.step: int | None = None

    def __call__(self, call: AttentionCall) -> Tensor | None:
        instead = None
        for attention in self.attentions:
            attention.cached, attention.step = self.cached, self.step
            instead = attention(call)
        return instead


def _decode(
    loaded: LoadedModel, cache: dict[str, Any], cached: int, tokens: Sequence[int], attention: Together
) -> Tensor:
    """Feed tokens one by one and return the logits after each, `[steps, vocabulary]` float32."""
    model, found = loaded.model, []
    with observed_attention(model, attention):
        for step, token in enumerate(tokens):
            attention.cached, attention.step = cached + step + 1, step
            fed = torch.tensor([[token]], device=model.device)
            output = model(fed, use_cache=True, logits_to_keep=1, **cache)
            found.append(output.logits[0, -1].float())
    return torch.stack(found)


def _compared(logits: Tensor, wanted: Tensor, attention: SparseAttention) -> Replayed:
    there, here = wanted.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = (there.exp() * (there - here)).sum(-1).clamp(min=0)
    tally = attention.tally
    return Replayed(
        kl=divergence.cpu(),
        agree=(logits.argmax(-1) == wanted.argmax(-1)).cpu(),
        kept=tally.kept,
        pages=tally.pages,
        oracle=tally.oracle,
        realised=torch.stack(tally.covered).cpu(),
    )
