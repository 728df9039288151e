"""See every attention call of a model without changing what it computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from coverage_lab.errors import CoverageLabError


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer was given in one forward call.

    Attributes
    ----------
    layer : int
        Index of the layer in the model.
    query : Tensor
        `[batch, query heads, new tokens, D]`, position encoded.
    key, value : Tensor
        `[batch, KV heads, cached tokens, D]`, the new tokens included; KV heads are not repeated.
    scaling : float
        Factor on the logits.
    window : int or None
        Sliding window in tokens, the query's own included.
    softcap : float or None
        Cap on the logits.
    sinks : Tensor or None
        `[query heads]`, learned sink logits that the model adds to the softmax.
    output : Tensor
        `[batch, new tokens, query heads, D]`, what the model's own attention made of it.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    output: Tensor


# What an observer returns, if anything, stands in for the output of the call.
Observer = Callable[[AttentionCall], Tensor | None]

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Call `observe` with every attention call of `model` inside the context.

    The model's own attention function (SDPA, flash or eager) and its own mask function still do the
    work, so outputs do not change, unless `observe` returns another one, shaped as `AttentionCall.output`.
    The model's configuration names ours inside the context only.

    Raises
    ------
    CoverageLabError
        If the model's attention can't be observed, or a context is open already.
    """
    if _observer.get() is not None:
        raise CoverageLabError("attention is being observed already; leave that context first")
    base = model.config._attn_implementation or "eager"
    name = _register(base)
    token = _observer.set(observe)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        _observer.reset(token)
        model.set_attn_implementation(base)


def _register(base: str) -> str:
    """Register our attention function over `base`, and the mask function of `base` under the same name."""
    attention, masks = AttentionInterface(), AttentionMaskInterface()
    if base not in masks:
        raise CoverageLabError(
            f"attention {base!r} has no mask function to go with it; load the model with sdpa"
        )
    function = attention.get(base)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        result = (function or _eager_attention(module))(module, query, key, value, attention_mask, **options)
        observe = _observer.get()
        if observe is not None:
            instead = observe(_call(module, query, key, value, result[0], options))
            if instead is not None:
                return (instead, *result[1:])
        return result

    # Keeps the base's name, in which transformers looks for "flash"; a slash would name a kernel on the hub.
    name = f"coverage_lab_{base}".replace("/", "_")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, masks[base])
    return name


def _call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor, options: dict[str, Any]
) -> AttentionCall:
    scaling = options.get("scaling")
    return AttentionCall(
        layer=module.layer_idx,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        output=output,
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which `model.forward` takes its cache; it depends on the transformers release."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fresh_cache(model: PreTrainedModel) -> dict[str, Any]:
    """Return an empty cache as an argument of `model.forward`."""
    return {cache_argument(model): DynamicCache(config=model.config)}


def _eager_attention(module: Any) -> Callable[..., Any]:
    # "eager" is no entry of the interface: each modeling file has its own.
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function
