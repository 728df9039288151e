"""Replay the recorded tokens of a request under policies, beside the dense model (paper 5.2 and 5.5.2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall, fresh_cache, observed_attention, refill
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.choice import Selector
from coverage_lab.replay.decoder import Backend, backend_for
from coverage_lab.replay.kernel import KernelAttention
from coverage_lab.replay.sparse import Lists, SparseAttention

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
    nll : Tensor
        `[steps - 1]` float64: negative log likelihood of the token that is fed next, nats.
    counts : dict of str to int
        See `Tally`: pages kept and seen, those of C*(0.95), values read besides and by dense attention.
    realised : Tensor
        `[layers * steps, KV heads]`: exact share of the kept pages, of the queries that the policy's own
        run has.
    backend : {"reference", "triton"}
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor
    counts: dict[str, int]
    realised: Tensor
    backend: Backend

    def record(self) -> dict[str, Any]:
        """Return the figures of the request as plain numbers; `kl` has one for every step."""
        counts = self.counts
        return {
            "steps": len(self.kl),
            "kl_mean": float(self.kl.mean()),
            "kl": [float(f"{value:.6g}") for value in self.kl.tolist()],
            "agreement": float(self.agree.double().mean()),
            "nll_mean": float(self.nll.mean()) if len(self.nll) else None,
            "kept": counts["kept"],
            "pages": counts["pages"],
            "oracle_pages": counts["oracle"],
            "reads": counts["kept"] / counts["pages"],
            "reads_metadata": counts["values"] / counts["dense_values"],
            "coverage_mean": float(self.realised.mean()),
            "backend": self.backend,
            **{f"{name}_rows": counts[key] for name, key in _CHECKED.items() if key in counts},
        }


# Rows whose lists were chosen on both backends, and those alike.
_CHECKED = {"checked": "rows", "equal": "equal"}


def replay_request(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    decoded_ids: Sequence[int],
    policies: Sequence[Policy],
    page_size: int,
    lists: ListsFrom = "live",
    *,
    backend: str | None = None,
    check: bool = False,
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
        Tokens a page, where a policy does not say.
    lists : {"live", "recorded"}
        `live`: every step selects from the queries of the sparse run. `recorded`: the lists are those that
        the dense run's queries choose.
    backend : {"reference", "triton"}, optional
        What runs the policies; the kernels where they can by default.
    check : bool
        Whether to choose in plain torch too where the kernels do, and to count the rows that are alike.
    done : callable
        Called after the dense run and after every policy.

    Returns
    -------
    list of Replayed
        One a policy.

    Raises
    ------
    CoverageLabError
        If the backend can't run a policy, or the logits are not finite.
    """
    backends = [backend_for(loaded, policy, page_size, backend) for policy in policies]
    selectors = [Selector(policy, page_size, loaded.model.dtype) for policy in policies]
    return replay_selectors(loaded, prompt_ids, decoded_ids, selectors, backends, lists, check, done)


@torch.inference_mode()
def replay_selectors(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    decoded_ids: Sequence[int],
    selectors: Sequence[Selector],
    backends: Sequence[Backend] | None = None,
    lists: ListsFrom = "live",
    check: bool = False,
    done: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """Do what `replay_request` does with selectors that have seen nothing yet; plain torch by default."""
    model, cached = loaded.model, len(prompt_ids)
    backends = backends or ["reference"] * len(selectors)
    # All see the prompt and summarize it; where lists are recorded, the dense run's steps too.
    everyone = Together([SparseAttention(selector, attend=False) for selector in selectors])
    cache = fresh_cache(model)
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    with observed_attention(model, everyone):
        everyone.begin(cached, None)
        model(prompt, use_cache=True, logits_to_keep=1, **cache)
    recorded = lists == "recorded"
    dense = everyone if recorded else Together([])
    wanted = _decode(loaded, copy.deepcopy(cache), cached, decoded_ids, dense)
    if not wanted.isfinite().all():
        raise CoverageLabError("the dense model's logits are not finite")
    done()
    found = []
    for selector, backend, seen in zip(selectors, backends, everyone.attentions, strict=True):
        given: Lists | None = seen.lists if recorded else None
        kernels = None
        if backend == "triton":
            lengths = torch.zeros(1, dtype=torch.int32, device=model.device)
            kernels = KernelAttention(selector.policy, selector.page_size, lengths)
            own = fresh_cache(model, cached + len(decoded_ids))
            refill(own, cache, cached)
        else:
            own = copy.deepcopy(cache)
        attention = SparseAttention(selector, lists=given, kernels=kernels, check=check)
        logits = _decode(loaded, own, cached, decoded_ids, Together([attention]))
        counts = attention.tally.taken()
        if recorded:
            # What the choice read, it read in the dense run.
            counts["values"] = seen.tally.taken()["values"]
        realised = torch.stack(attention.tally.covered)
        found.append(_compared(logits, wanted, decoded_ids, counts, realised, backend))
        done()
    return found


class Together:
    """Several attentions that see the same calls; the output of the last one that has any counts."""

    def __init__(self, attentions: Sequence[SparseAttention]) -> None:
        self.attentions = list(attentions)

    def begin(self, cached: int, step: int | None) -> None:
        """Say that a forward call begins; see `SparseAttention.begin`."""
        for attention in self.attentions:
            attention.begin(cached, step)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        instead = None
        for attention in self.attentions:
            instead = attention(call)
        return instead


def _decode(
    loaded: LoadedModel, cache: dict[str, Any], cached: int, tokens: Sequence[int], attention: Together
) -> Tensor:
    """Feed tokens one by one and return the logits after each, `[steps, vocabulary]` float32."""
    model, found = loaded.model, []
    with observed_attention(model, attention):
        for step, token in enumerate(tokens):
            attention.begin(cached + step + 1, step)
            fed = torch.tensor([[token]], device=model.device)
            output = model(fed, use_cache=True, logits_to_keep=1, **cache)
            found.append(output.logits[0, -1].float())
    return torch.stack(found)


def _compared(
    logits: Tensor,
    wanted: Tensor,
    tokens: Sequence[int],
    counts: dict[str, int],
    realised: Tensor,
    backend: Backend,
) -> Replayed:
    there, here = wanted.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = (there.exp() * (there - here)).sum(-1).clamp(min=0)
    following = torch.tensor(list(tokens[1:]), dtype=torch.long, device=logits.device)
    return Replayed(
        kl=divergence.cpu(),
        agree=(logits.argmax(-1) == wanted.argmax(-1)).cpu(),
        nll=-here[:-1].gather(1, following[:, None])[:, 0].cpu(),
        counts=counts,
        realised=realised.cpu(),
        backend=backend,
    )
