"""A decode step of a whole model as one CUDA graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from coverage_lab.collectors.attention import observed_attention
from coverage_lab.replay.kernel import EveryPage, KernelAttention

# Kernels are compiled and workspaces allocated before the capture.
WARM_UPS = 2


class CapturedStep:
    """One decode step over a static cache, captured once and replayed from then on.

    Parameters
    ----------
    model : PreTrainedModel
        With full attention in every layer.
    cache : dict
        The static cache as an argument of `model.forward`; it has room for a few tokens more.
    kernels : KernelAttention or EveryPage, optional
        Stand in for the attention; without them it is the model's own.
    lengths : Tensor
        `[B]` int32: tokens in the cache.
    max_tokens : int
        Places of the cache.
    """

    def __init__(
        self,
        model: Any,
        cache: dict[str, Any],
        kernels: KernelAttention | EveryPage | None,
        lengths: Tensor,
        max_tokens: int,
    ) -> None:
        device, batch = model.device, len(lengths)
        self._model, self._cache, self._lengths = model, cache, lengths
        self._tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._position = torch.full((batch, 1), int(lengths[0]), device=device)
        self._places = torch.arange(max_tokens, device=device)
        # A mask of four dimensions is taken as it is, and made here without waiting for the host.
        self._mask = torch.zeros(1, 1, 1, max_tokens, dtype=torch.bool, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with nullcontext() if kernels is None else observed_attention(model, kernels):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._step()
            torch.cuda.current_stream(device).wait_stream(stream)
            with torch.cuda.graph(self._graph):
                self._logits = self._step()

    def begin(self, tokens: int) -> None:
        """Say that the cache holds a new prompt of so many tokens."""
        self._position.fill_(tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Feed tokens `[B, 1]`; returns the logits, `[B, vocabulary]`, in a tensor of their own."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()

    def _step(self) -> Tensor:
        self._lengths += 1
        torch.le(self._places, self._position[0], out=self._mask[0, 0, 0])
        output = self._model(
            self._tokens,
            attention_mask=self._mask,
            position_ids=self._position,
            use_cache=True,
            logits_to_keep=1,
            **self._cache,
        )
        self._position += 1
        return output.logits[:, -1]
