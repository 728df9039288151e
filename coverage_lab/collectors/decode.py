"""Prefill and decode one batch while its attention is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall, fresh_cache, observed_attention
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.collectors.recorder import RequestRecorder


@dataclass
class Decoded:
    """What one request decoded.

    Attributes
    ----------
    ids : list of int
        Tokens that were fed, one a step.
    stop : {"length", "eos", "reference", "error"}
        Why it ended.
    error : str or None
        What went wrong.
    """

    ids: list[int] = field(default_factory=list)
    stop: str = "length"
    error: str | None = None

    @property
    def active(self) -> bool:
        return self.stop == "length"


def decode_batch(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    recorders: Sequence[RequestRecorder],
    steps: int,
    references: Sequence[Sequence[int]] | None = None,
    stop_ids: frozenset[int] = frozenset(),
    after_step: Callable[[], None] = lambda: None,
) -> list[Decoded]:
    """Decode a batch and show every attention call to the recorders.

    Parameters
    ----------
    loaded : LoadedModel
    prompts : sequence of token ids
        One a request; shorter ones are padded on the left, and the padding is masked.
    recorders : sequence of RequestRecorder
        One a request, made with its padding.
    steps : int
        Most steps; step t feeds token t, and token 0 is the one that the prompt's last logits choose.
    references : sequence of token ids, optional
        Tokens to feed in place of the greedy ones; a request ends where its reference does.
    stop_ids : frozenset of int
        Tokens that end a greedy request before they are fed.
    after_step : callable
        Called after every step, to empty recorders that are full.

    Returns
    -------
    list of Decoded
    """
    model = loaded.model
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask: Tensor | None = None
    if any(len(p) != longest for p in prompts):
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    results = [Decoded() for _ in prompts]
    cached, step = longest, None

    def observe(call: AttentionCall) -> None:
        for row, (recorder, result) in enumerate(zip(recorders, results, strict=True)):
            if result.active:
                recorder.see(call, row, cached, step)

    cache = fresh_cache(model)
    with torch.inference_mode(), observed_attention(model, observe):
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache
        ).logits[:, -1]
        for step in range(steps):
            tokens = _next_tokens(logits, results, step, references, stop_ids)
            if not any(result.active for result in results):
                break
            cached += 1
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
                positions = mask.sum(1, keepdim=True) - 1
            logits = model(
                tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache
            ).logits[:, -1]
            after_step()
        _mark_nan(results, logits.isnan().any(-1).tolist(), steps)
    return results


def _next_tokens(
    logits: Tensor,
    results: list[Decoded],
    step: int,
    references: Sequence[Sequence[int]] | None,
    stop_ids: frozenset[int],
) -> Tensor:
    """Choose the tokens of a step `[batch, 1]`, and end the requests that have none.

    This is the only point of a step where the host waits for the device.
    """
    nan, greedy = torch.stack([logits.isnan().any(-1).long(), logits.argmax(-1)]).tolist()
    _mark_nan(results, nan, step)
    tokens = list(greedy)
    for row, result in enumerate(results):
        if not result.active:
            continue
        if references is not None:
            if step >= len(references[row]):
                result.stop = "reference"
                continue
            tokens[row] = references[row][step]
        elif tokens[row] in stop_ids:
            result.stop = "eos"
            continue
        result.ids.append(tokens[row])
    return torch.tensor(tokens, device=logits.device)[:, None]


def _mark_nan(results: list[Decoded], nan: Sequence[int], step: int) -> None:
    for result, bad in zip(results, nan, strict=True):
        if bad and result.active:
            where = "after the prompt" if step == 0 else f"after step {step - 1}"
            result.stop, result.error = "error", f"NaN in the model's logits {where}"
