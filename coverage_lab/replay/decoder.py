"""A model that reads its prompt dense and decodes under a policy (paper, sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall, fresh_cache, observed_attention, refill
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import check_page_size
from coverage_lab.policies.budgets.profiled import Profiled
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.block import geometry
from coverage_lab.replay.choice import Selector
from coverage_lab.replay.graph import CapturedStep
from coverage_lab.replay.kernel import KernelAttention, selects, why_not
from coverage_lab.replay.sparse import SparseAttention

Backend = Literal["reference", "triton"]
BACKENDS: tuple[Backend, ...] = ("reference", "triton")


def check_backend(asked: str | None) -> None:
    """Raise CoverageLabError for the name of no backend."""
    if asked not in (None, *BACKENDS):
        raise CoverageLabError(f"backend {asked!r} is not reference or triton")


def backend_for(loaded: LoadedModel, policy: Policy, page_size: int, asked: str | None = None) -> Backend:
    """Return what runs a policy: what is asked for, or else the kernels where they can.

    Raises
    ------
    CoverageLabError
        If the backend that is asked for can't run it, with the reason.
    """
    check_backend(asked)
    if asked == "reference":
        return "reference"
    reason = why_not(loaded, policy, page_size)
    if reason and asked:
        raise CoverageLabError(f"the kernels can't run {policy} here: {reason}; --backend reference can")
    return "reference" if reason else "triton"


def check_policy(policy: Policy, loaded: LoadedModel, page_size: int) -> None:
    """Raise CoverageLabError if a policy does not go with a model: its layers, its profile."""
    layers = [layer.layer for layer in loaded.layers]
    unknown = set(policy.dense_layers) - set(layers)
    if unknown:
        raise CoverageLabError(
            f"policy {policy}: the model has no layer {min(unknown)}; it has {min(layers)} to {max(layers)}"
        )
    if isinstance(policy.budget, Profiled):
        size, device = policy.page_size or page_size, torch.device("cpu")
        for layer in loaded.layers:
            if layer.layer not in policy.dense_layers:
                rows = geometry(1, 1, None, size, layer.layer, layer.kv_heads, device).rows
                policy.budget.select(torch.ones(layer.kv_heads, 1), rows)
    if policy.within is not None:
        check_policy(policy.within, loaded, page_size)


class Decoder:
    """Reads prompts dense, then decodes token by token under a policy.

    Parameters
    ----------
    loaded : LoadedModel
    policy : Policy or str, optional
        Dense attention by default.
    page_size : int
        Tokens a page, where the policy does not say.
    backend : {"reference", "triton"}, optional
        Plain torch, or the kernels; by default the kernels where they can.
    max_tokens : int, optional
        Keep a static cache of so many tokens; by default the cache grows.
    graph : bool
        Capture a decode step in a CUDA graph, and replay it from then on: dense or on the kernels, with a
        static cache and full attention in every layer.

    Attributes
    ----------
    backend : {"reference", "triton"}

    Raises
    ------
    CoverageLabError
        For what can't be run, with the reason.

    Examples
    --------
    ::

        loaded = load_model("smollm2")
        decoder = Decoder(loaded, Policy.parse("mvar/coverage:0.98"))
        decoder.generate(loaded.tokenizer("Once upon a time")["input_ids"], 20)
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Policy | str | None = None,
        page_size: int = 64,
        *,
        backend: str | None = None,
        max_tokens: int | None = None,
        graph: bool = False,
    ) -> None:
        check_page_size(page_size)
        check_backend(backend)
        if not isinstance(loaded, LoadedModel):
            raise CoverageLabError(f"{loaded!r} is no loaded model; load_model(...) returns one")
        if isinstance(policy, str):
            policy = parse_policy(policy)
        if not isinstance(policy, Policy | None):
            raise CoverageLabError(f"{policy!r} is no policy; write one such as 'mvar/coverage:0.98'")
        if policy is not None:
            check_policy(policy, loaded, page_size)
        self.loaded, self.policy, self.page_size = loaded, policy, page_size
        self.backend: Backend = (
            "reference" if policy is None else backend_for(loaded, policy, page_size, backend)
        )
        window = loaded.max_tokens
        if not isinstance(max_tokens, Integral | None) or isinstance(max_tokens, bool):
            raise CoverageLabError(f"max_tokens {max_tokens!r} is no number of tokens")
        if max_tokens is not None and (max_tokens < 1 or (window is not None and max_tokens > window)):
            raise CoverageLabError(f"a cache of {max_tokens} tokens; the model's window has {window}")
        self.max_tokens, self.graph = max_tokens, graph
        if graph:
            self._check_graph()
        self._batch = self._cached = self._steps = 0
        self._cache: dict[str, Any] = {}
        self._lengths = torch.zeros(0, dtype=torch.int32, device=loaded.model.device)
        self._kernels: KernelAttention | None = None
        self._attention: SparseAttention | None = None
        self._captured: CapturedStep | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts of one length, and forget what was there; returns the logits, `[B, vocabulary]`.

        Raises
        ------
        CoverageLabError
            For prompts of several lengths, a batch that can't be run as one, or too many tokens.
        """
        ids = self._token_ids(prompts)
        length = ids.shape[1]
        self._check_room(length)
        if len(prompts) > 1 and self.policy is not None and not self._fused:
            raise CoverageLabError(
                f"lists of {self.policy} are chosen for one request at a time, not a batch"
            )
        if len(prompts) != self._batch:
            self._begin_batch(len(prompts))
        self._cached, self._steps = length, 0
        if self.policy is not None and not self._fused:
            selector = Selector(self.policy, self.page_size, self.loaded.model.dtype)
            self._attention = SparseAttention(selector, kernels=self.backend == "triton")
        return self._read(ids)

    def _token_ids(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return prompts as `[B, tokens]`, or raise CoverageLabError if they are no tokens of the model."""
        try:
            lists = [list(prompt) for prompt in prompts]
            ids = torch.as_tensor(lists) if len({len(prompt) for prompt in lists}) == 1 else torch.zeros(0, 0)
        except (ValueError, TypeError, RuntimeError):
            ids = torch.zeros(0)
        if ids.ndim != 2 or (ids.numel() and not _whole(ids)):
            raise CoverageLabError(
                "a prompt is a list of token ids; loaded.tokenizer(text).input_ids makes one"
            )
        if not ids.numel():
            raise CoverageLabError("prompts must have a token or more, and in one batch as many each")
        ids = ids.long()
        self._check_known(ids)
        return ids

    def _check_known(self, ids: Tensor) -> None:
        embeddings: Any = self.loaded.model.get_input_embeddings()
        size = len(embeddings.weight)
        if ids.min() < 0 or ids.max() >= size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise CoverageLabError(f"token {wrong} is not one of the model's {size:,}")

    def _read(self, prompts: Tensor) -> Tensor:
        model, layers = self.loaded.model, self.loaded.layers
        # A prompt is read into a cache that grows: for a static one a mask would span all its places.
        grows = not self.loaded.skipped_layers and not any(layer.window for layer in layers)
        cache = fresh_cache(model, None if grows else self.max_tokens)
        with self._observed(None):
            ids = prompts.to(model.device)
            logits = model(ids, use_cache=True, logits_to_keep=1, **cache).logits[:, -1]
        if self.max_tokens is None or not grows:
            self._cache = cache
            return logits
        if not self._cache:
            self._cache = fresh_cache(model, self.max_tokens)
        if self.graph and self._captured is None:
            # Steps that warm up write after the first token.
            self._fill(cache, 1)
            self._captured = CapturedStep(model, self._cache, self._kernels, self._lengths, self.max_tokens)
        self._fill(cache, prompts.shape[1])
        return logits

    def _fill(self, source: dict[str, Any], tokens: int) -> None:
        """Copy the first tokens of a cache into the static one, and forget what was there."""
        refill(self._cache, source, tokens)
        self._lengths.fill_(tokens)
        if self._kernels is not None:
            self._kernels.begin()
        if self._captured is not None:
            self._captured.begin(tokens)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Feed one token a request, `[B]`; returns the logits, `[B, vocabulary]`.

        Tokens that are on a GPU already are taken as they are: to look at them would be to wait for it.

        Raises
        ------
        CoverageLabError
            Before a prompt, for another number of tokens, for one that the model does not know, or where the
            cache is full.
        """
        if not self._cached:
            raise CoverageLabError("there is no prompt yet; call prefill first")
        fed = self._fed(tokens)
        if len(fed) != self._batch:
            raise CoverageLabError(f"{len(fed)} tokens for {self._batch} requests; give one for each")
        self._check_room(self._cached + 1)
        self._cached += 1
        if self._captured is not None:
            logits = self._captured(fed)
        else:
            self._lengths.fill_(self._cached)
            with self._observed(self._steps):
                output = self.loaded.model(fed, use_cache=True, logits_to_keep=1, **self._cache)
            logits = output.logits[:, -1]
            if self._attention is not None:
                # Over a long answer these would fill the memory.
                self._attention.tally.covered.clear()
        self._steps += 1
        return logits

    def _fed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return the tokens of a step on the model's device, `[B, 1]`."""
        try:
            ids = torch.as_tensor(tokens)
        except (ValueError, TypeError, RuntimeError):
            ids = torch.zeros(0, 0)
        if ids.ndim != 1 or (len(ids) and not _whole(ids)):
            raise CoverageLabError("a step takes one token id of each request, [B] whole numbers")
        ids = ids.long()
        if len(ids) and not ids.is_cuda:
            self._check_known(ids)
        return ids.to(self.loaded.model.device)[:, None]

    def _left_dense(self) -> int:
        """Pages read since the prompt in layers that stay dense, which the kernels do not count."""
        assert self.policy is not None
        heads = sum(layer.kv_heads for layer in self.loaded.layers if layer.layer in self.policy.dense_layers)
        size = self.policy.page_size or self.page_size
        lengths = range(self._cached - self._steps + 1, self._cached + 1)
        return heads * self._batch * sum(-(-length // size) for length in lengths)

    def generate(self, prompt: Sequence[int], steps: int, stop_ids: Collection[int] = ()) -> list[int]:
        """Return the greedy answer to one prompt: at most `steps` tokens, without the one that ends it.

        For a batch, `prefill` and `step`.
        """
        if steps < 0:
            raise CoverageLabError(f"{steps} steps; give how many tokens the answer may have")
        logits, answer = self.prefill([prompt]), list[int]()
        while len(answer) < steps:
            token = int(logits[0].argmax())
            if token in stop_ids:
                break
            answer.append(token)
            if len(answer) < steps:
                logits = self.step([token])
        return answer

    @property
    def reads(self) -> tuple[int, int]:
        """Pages kept and pages seen since the prompt, over layers, KV heads and steps.

        A layer that the policy leaves dense keeps what it sees; without a policy nothing is counted.
        """
        if self._attention is not None:
            counts = self._attention.tally.taken()
            return counts.get("kept", 0), counts.get("pages", 0)
        if self._kernels is not None:
            kept, pages = self._kernels.reads.tolist()
            dense = self._left_dense()
            return kept + dense, pages + dense
        return 0, 0

    def _check_room(self, tokens: int) -> None:
        most = self.max_tokens or self.loaded.max_tokens
        if most is not None and tokens > most:
            what = "cache" if self.max_tokens else "model's window"
            raise CoverageLabError(f"{tokens} tokens do not fit in the {what} of {most}")

    def _check_graph(self) -> None:
        reason = None
        if self.max_tokens is None or self.max_tokens < 4:
            reason = "it needs a static cache; give max_tokens, for the prompt and the answer together"
        elif self.loaded.model.device.type != "cuda":
            reason = "it needs a GPU"
        elif self.policy is not None and not self._fused:
            reason = f"lists of {self.policy} are chosen in plain torch, which waits for the host"
        elif any(layer.window for layer in self.loaded.layers):
            reason = "a layer has a sliding window"
        if reason:
            raise CoverageLabError(f"a decode step can't be captured: {reason}")

    @property
    def _fused(self) -> bool:
        """Whether the kernels choose and attend in one go."""
        return self.backend == "triton" and self.max_tokens is not None and selects(self.policy)

    def _begin_batch(self, batch: int) -> None:
        """Forget all that was made for a batch of another size."""
        self._batch, self._cache, self._captured = batch, {}, None
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=self.loaded.model.device)
        if self.policy is not None and self._fused:
            self._kernels = KernelAttention(self.policy, self.page_size, self._lengths)

    def _observed(self, step: int | None) -> Any:
        """Put the policy's attention in place of the model's own, for one forward call."""
        observe: Callable[[AttentionCall], Tensor | None] | None = None
        if self._attention is not None:
            self._attention.begin(self._cached, step)
            observe = self._attention
        elif step is not None:
            observe = self._kernels
        return nullcontext() if observe is None else observed_attention(self.loaded.model, observe)


def _whole(ids: Tensor) -> bool:
    return not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
