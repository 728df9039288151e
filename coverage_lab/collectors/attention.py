"""See every attention call of a model, and put another output in its place where one is given."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

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
    compute : callable
        Runs the model's own attention; the first of what it returns is the output.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    compute: Callable[[], tuple[Tensor, ...]]

    @functools.cached_property
    def own(self) -> tuple[Tensor, ...]:
        """What the model's own attention returns; it runs when this is first asked for."""
        return self.compute()

    @property
    def output(self) -> Tensor:
        """`[batch, new tokens, query heads, D]`: what the model's own attention makes of the call."""
        return self.own[0]


# What an observer returns, if anything, stands in for the output of the call.
Observer = Callable[[AttentionCall], Tensor | None]

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Call `observe` with every attention call of `model` inside the context.

    The model's own attention function (SDPA, flash or eager) and its own mask function still do the
    work, so outputs do not change, unless `observe` returns another one, shaped as `AttentionCall.output`;
    then the model's own does not run.
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
        def compute() -> Any:
            own = function or _eager_attention(module)
            return own(module, query, key, value, attention_mask, **options)

        observe = _observer.get()
        if observe is None:
            return compute()
        call = _call(module, query, key, value, options, compute)
        instead = observe(call)
        return call.own if instead is None else (instead, None)

    # Keeps the base's name, in which transformers looks for "flash"; a slash would name a kernel on the hub.
    name = f"coverage_lab_{base}".replace("/", "_")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, masks[base])
    return name


def _call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    compute: Callable[[], tuple[Tensor, ...]],
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
        compute=compute,
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which `model.forward` takes its cache; it depends on the transformers release."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fresh_cache(model: PreTrainedModel, max_tokens: int | None = None) -> dict[str, Any]:
    """Return an empty cache as an argument of `model.forward`: one that grows, or one of so many tokens."""
    config = model.config
    cache = DynamicCache(config=config) if max_tokens is None else StaticCache(config, max_tokens)
    return {cache_argument(model): cache}


def refill(cache: dict[str, Any], source: dict[str, Any], tokens: int) -> None:
    """Empty a static cache and copy the first tokens of another into it; both as `fresh_cache` gives them."""
    (kept,), (read,) = cache.values(), source.values()
    kept.reset()
    for index, layer in enumerate(read.layers):
        kept.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)


def _eager_attention(module: Any) -> Callable[..., Any]:
    # "eager" is no entry of the interface: each modeling file has its own.
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function
