"""The kernels in place of a model's attention, while it decodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.kernels.cache import PagedCache, check_geometry
from coverage_lab.kernels.decode import DecodePath
from coverage_lab.kernels.device import backend
from coverage_lab.kernels.lists import PageLists, pack
from coverage_lab.kernels.ragged import Attend
from coverage_lab.policies.budgets.coverage import Coverage
from coverage_lab.policies.budgets.fixed import Fixed
from coverage_lab.policies.policy import Policy


def why_not(loaded: LoadedModel, policy: Policy, page_size: int) -> str | None:
    """Return why the kernels can't run a policy on a model, or None where they can."""
    if loaded.skipped_layers:
        return f"layer {loaded.skipped_layers[0]} has no attention, and a static cache no place for it"
    for layer in loaded.layers:
        for what, there in (
            ("a sliding window", layer.window),
            ("a cap on its logits", layer.softcap),
            ("sink logits", layer.sinks),
        ):
            if there:
                return f"layer {layer.layer} has {what}"
        try:
            group = layer.query_heads // layer.kv_heads
            check_geometry(layer.head_dim, policy.page_size or page_size, group)
        except ValueError as error:
            return str(error)
    if policy.compensate:
        return "they leave dropped pages out and compensate nothing"
    model = loaded.model
    if backend(model.device, model.dtype) != "triton" or model.dtype == torch.float32:
        return f"they need a GPU and bfloat16 or float16; the model is {model.dtype} on {model.device.type}"
    return None


def selects(policy: Policy | None) -> bool:
    """Return whether Estimate and Select express a policy; else its lists are chosen in plain torch."""
    if policy is None:
        return False
    budget = policy.budget
    counted = isinstance(budget, Fixed) and (budget.pages is None or float(budget.pages).is_integer())
    return (
        policy.estimator.name in ("mvar", "mean", "quest")
        and (counted or isinstance(budget, Coverage))
        and policy.granularity == "kv_head"
        and policy.within is None
        and policy.compensate is None
    )


class KernelAttention:
    """Runs the decode calls of a model on the kernels; one token of each request is new.

    Where Estimate and Select express the policy, and the cache is static, `self(call)` chooses and attends;
    `attend` takes the pages of any selector. Calls can be captured in a CUDA graph.

    Parameters
    ----------
    policy : Policy
        One that `why_not` has nothing against.
    page_size : int
        Tokens a page, where the policy does not say.
    lengths : Tensor
        `[B]` int32 on the model's device: tokens in the cache, the new one included; the caller keeps it.
    static : bool
        Whether the cache's tensors stay where they are.
    counts : mapping, optional
        Pages of every row, `[B, KV heads]` integers by layer, in place of those of the policy's budget.
    """

    def __init__(
        self,
        policy: Policy,
        page_size: int,
        lengths: Tensor,
        static: bool = True,
        counts: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.policy, self.page_size, self.lengths = policy, policy.page_size or page_size, lengths
        self.selects = static and selects(policy)
        self._counts = counts
        self._paths: dict[int, DecodePath] = {}
        self._attends: dict[tuple[object, ...], Attend] = {}
        self._before = torch.zeros(2, dtype=torch.int64, device=lengths.device)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Return the attention of a decode call, `[B, 1, query heads, D]`; None where a layer stays dense."""
        if call.layer in self.policy.dense_layers:
            return None
        path = self._paths.get(call.layer)
        if path is None:
            path = self._paths[call.layer] = self._path(call)
            path.summarize()
        return path(call.query[:, :, 0])[:, None]

    def begin(self) -> None:
        """Say that the cache has been filled anew, and `lengths` count it."""
        for path in self._paths.values():
            path.summarize()
        self._before += self.reads

    def kept(self, layer: int, cached: int) -> Tensor:
        """Return what the latest call of a layer kept of its first request, `[KV heads, P]` bool."""
        path = self._paths[layer]
        pages, counts = path.pages[0].long(), path.counts[0]
        listed = torch.arange(pages.shape[1], device=pages.device) < counts[:, None]
        kept = torch.zeros_like(listed)
        kept.scatter_(1, pages.where(listed, pages[:, :1]), True)
        return kept[:, : -(-cached // self.page_size)]

    def attend(self, call: AttentionCall, kept: Tensor) -> Tensor:
        """Return the attention of a decode call over pages `[KV heads, P]` bool, `[1, 1, query heads, D]`."""
        cache = self._cache(call)
        key = cache.rows, cache.head_dim, cache.key.dtype, call.query.shape[1], call.scaling
        if key not in self._attends:
            self._attends[key] = Attend(cache, call.query.shape[1], call.scaling)
        # The kept pages come first, in their order.
        pages = (~kept).int().sort(stable=True, dim=1).indices
        lists = pack(cache, pages[None].int(), kept.sum(1, dtype=torch.int32)[None])
        return self._attends[key](call.query[:, :, 0], cache, lists)[:, None]

    @property
    def reads(self) -> Tensor:
        """Pages kept and pages seen since the latest `begin`, `[2]` int64 on the device."""
        return sum((path.reads for path in self._paths.values()), -self._before)

    def _cache(self, call: AttentionCall) -> PagedCache:
        return PagedCache.contiguous(call.key, call.value, self.lengths, self.page_size)

    def _path(self, call: AttentionCall) -> DecodePath:
        budget = self.policy.budget
        limit: dict[str, float | int | Tensor] = {}
        if self._counts is not None:
            limit["count"] = self._counts[call.layer]
        elif isinstance(budget, Coverage):
            limit["gamma"] = budget.gamma
        elif isinstance(budget, Fixed):
            limit["count"] = int(budget.in_pages(self.page_size))
        return DecodePath(
            self._cache(call),
            call.query.shape[1],
            estimator=self.policy.estimator.name,  # type: ignore[arg-type]
            scale=call.scaling,
            **limit,  # type: ignore[arg-type]
        )


class EveryPage:
    """Dense attention on the kernels: every page of every row. It can be captured in a CUDA graph.

    Parameters
    ----------
    page_size : int
    lengths : Tensor
        `[B]` int32 on the model's device: tokens in the cache, the new one included; the caller keeps it.
    """

    def __init__(self, page_size: int, lengths: Tensor) -> None:
        self.page_size, self.lengths = page_size, lengths
        self._first: int | None = None
        self._attend: Attend | None = None
        self._lists: PageLists | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the attention of a decode call, `[B, 1, query heads, D]`."""
        cache = PagedCache.contiguous(call.key, call.value, self.lengths, self.page_size)
        if self._attend is None:
            self._first = call.layer
            self._attend = Attend(cache, call.query.shape[1], call.scaling)
        if call.layer == self._first or self._lists is None:
            # All layers of a step read the same pages.
            pages = torch.arange(cache.max_pages, dtype=torch.int32, device=call.key.device)
            counts = cache.pages_held.int()[:, None].expand(-1, cache.kv_heads)
            self._lists = pack(cache, pages.expand(cache.batch, cache.kv_heads, -1), counts)
        return self._attend(call.query[:, :, 0], cache, self._lists)[:, None]

    def begin(self) -> None:
        """Nothing is kept from one prompt to the next."""
