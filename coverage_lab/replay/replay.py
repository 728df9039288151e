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
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.evaluate import TOLERANCE
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.choice import Selector
from coverage_lab.replay.decoder import Backend, backend_for
from coverage_lab.replay.sparse import ORACLE_GAMMA, SparseAttention

ListsFrom = Literal["live", "recorded"]
# Steps that go through a layer together.
BLOCK = 64


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
        `[steps]` float64: negative log likelihood of every token that is fed, nats; that of the first
        follows from the prompt, which is read dense.
    counts : dict of str to int
        See `Tally`: pages kept and seen, those of C*(0.95), values read besides and by dense attention.
    realised : Tensor
        `[layers * steps * KV heads]`, in no order: exact share of the kept pages, of the queries that the
        policy's own run has.
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
            "nll_mean": float(self.nll.mean()),
            "kept": counts["kept"],
            "pages": counts["pages"],
            "oracle_pages": counts["oracle"],
            "reads": counts["kept"] / counts["pages"],
            "reads_metadata": counts["values"] / counts["dense_values"],
            "coverage_mean": float(self.realised.mean()),
            # A hair below is rounding of float32 sums.
            "rows_below": float((self.realised < ORACLE_GAMMA - TOLERANCE).double().mean()),
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
    request = PreparedRequest(loaded, prompt_ids, decoded_ids, selectors)
    if lists == "recorded":
        # Those that choose in the dense run go on to see its keys.
        selectors = [selector.fork() for selector in selectors]
    seen = request.decode_dense(choose=lists == "recorded")
    done()
    found = []
    for selector, runs_on, chosen in zip(selectors, backends, seen, strict=True):
        found.append(request.decode(selector, runs_on, chosen, check))
        done()
    return found


class PreparedRequest:
    """A request whose prompt has been read, and that can be decoded again and again.

    Parameters
    ----------
    loaded : LoadedModel
    prompt_ids, decoded_ids : sequence of int
        The prompt, which is read dense, and the tokens that are fed one a step.
    selectors : sequence of Selector
        They see the prompt. Each serves one decoding; `Selector.fork` makes more.
    """

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        prompt_ids: Sequence[int],
        decoded_ids: Sequence[int],
        selectors: Sequence[Selector],
    ) -> None:
        self.loaded, self.decoded_ids, self.cached = loaded, list(decoded_ids), len(prompt_ids)
        self._everyone = Together([SparseAttention(selector, attend=False) for selector in selectors])
        self._cache = fresh_cache(loaded.model)
        prompt = torch.tensor([list(prompt_ids)], device=loaded.model.device)
        with observed_attention(loaded.model, self._everyone):
            self._everyone.begin(self.cached, None)
            output = loaded.model(prompt, use_cache=True, logits_to_keep=1, **self._cache)
        self._first = output.logits[0].float()
        self._dense: Tensor | None = None

    @torch.inference_mode()
    def decode_dense(self, choose: bool = False) -> Sequence[SparseAttention | None]:
        """Decode dense, before anything else.

        With `choose` every selector chooses from the queries of this run; the attentions that hold the lists
        are returned, one a selector, and go to `decode`.
        """
        watching = self._everyone if choose else Together([])
        self._dense = self._logits(copy.deepcopy(self._cache), watching)
        if not self._dense.isfinite().all():
            raise CoverageLabError("the dense model's logits are not finite")
        return self._everyone.attentions if choose else [None] * len(self._everyone.attentions)

    @torch.inference_mode()
    def decode(
        self,
        selector: Selector,
        backend: Backend = "reference",
        chosen: SparseAttention | None = None,
        check: bool = False,
    ) -> Replayed:
        """Decode under a policy, with the lists of `chosen` if given, and compare with the dense run."""
        lists = None if chosen is None else chosen.lists
        attention = SparseAttention(selector, lists=lists, kernels=backend == "triton", check=check)
        logits = self._logits(copy.deepcopy(self._cache), Together([attention]))
        counts = attention.tally.taken()
        if chosen is not None:
            # What the choice read, it read in the dense run.
            counts["values"] = chosen.tally.taken()["values"]
        realised = torch.cat(attention.tally.covered)
        assert self._dense is not None, "decode_dense comes first"
        before = torch.cat([self._first, logits[:-1]]).double().log_softmax(-1)
        fed = torch.tensor(self.decoded_ids, device=logits.device)
        there, here = self._dense.double().log_softmax(-1), logits.double().log_softmax(-1)
        return Replayed(
            kl=(there.exp() * (there - here)).sum(-1).clamp(min=0).cpu(),
            agree=(logits.argmax(-1) == self._dense.argmax(-1)).cpu(),
            nll=-before.gather(1, fed[:, None])[:, 0].cpu(),
            counts=counts,
            realised=realised.cpu(),
            backend=backend,
        )

    def _logits(self, cache: dict[str, Any], attention: Together) -> Tensor:
        """Feed the tokens, some at a time; returns the logits after each, `[steps, vocabulary]` float32."""
        model, found = self.loaded.model, []
        with observed_attention(model, attention):
            for start in range(0, len(self.decoded_ids), BLOCK):
                fed = torch.tensor([self.decoded_ids[start : start + BLOCK]], device=model.device)
                attention.begin(self.cached + start + fed.shape[1], start)
                found.append(model(fed, use_cache=True, **cache).logits[0].float())
        return torch.cat(found)


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
