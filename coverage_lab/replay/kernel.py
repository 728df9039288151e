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
from coverage_lab.kernels.ragged import Attend, attend
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
    """Chooses and attends on the kernels, with a static cache; one token of each request is new in a call.

    Calls can be captured in a CUDA graph.

    Parameters
    ----------
    policy : Policy
        One that Estimate and Select express.
    page_size : int
        Tokens a page, where the policy does not say.
    lengths : Tensor
        `[B]` int32 on the model's device: tokens in the cache, the new one included; the caller keeps it.
    counts : mapping, optional
        Pages of every row, `[B, KV heads]` integers by layer, in place of those of the policy's budget.
    """

    def __init__(
        self,
        policy: Policy,
        page_size: int,
        lengths: Tensor,
        counts: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.policy, self.page_size, self.lengths = policy, policy.page_size or page_size, lengths
        self._counts = counts or {}
        self._paths: dict[int, DecodePath] = {}
        self._before = torch.zeros(2, dtype=torch.int64, device=lengths.device)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Return the attention of a decode call, `[B, 1, query heads, D]`; None where a layer stays dense."""
        if call.layer in self.policy.dense_layers:
            return None
        path = self._paths.get(call.layer)
        if path is None:
            cache = PagedCache.contiguous(call.key, call.value, self.lengths, self.page_size)
            counts = self._counts.get(call.layer)
            path = self._paths[call.layer] = _path(call, cache, self.policy, counts)
            path.summarize()
        return path(call.query[:, :, 0])[:, None]

    def begin(self) -> None:
        """Say that the cache has been filled anew, and `lengths` count it."""
        for path in self._paths.values():
            path.summarize()
        self._before += self.reads

    @property
    def reads(self) -> Tensor:
        """Pages kept and pages seen since the latest `begin`, `[2]` int64 on the device."""
        return sum((path.reads for path in self._paths.values()), -self._before)


def select_and_attend(
    call: AttentionCall, policy: Policy, cached: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Choose and attend in some steps of one request, each as a request of its own.

    Returns
    -------
    output : Tensor
        `[1, T, query heads, D]`.
    kept : Tensor
        `[rows, P]` bool, a row a KV head in a step.
    """
    cache = _steps(call, cached, page_size)
    path = _path(call, cache, policy)
    path.summarize()
    output = path(call.query[0].transpose(0, 1))
    pages, counts = path.pages.flatten(0, 1).long(), path.counts.flatten()
    listed = torch.arange(pages.shape[1], device=pages.device) < counts[:, None]
    kept = torch.zeros_like(listed)
    kept.scatter_(1, pages.where(listed, pages[:, :1]), True)
    return output[None], kept[:, : -(-cached // page_size)]


def attend_lists(call: AttentionCall, kept: Tensor, cached: int, page_size: int) -> Tensor:
    """Return the attention over pages `[rows, P]` bool in some steps of one request, `[1, T, heads, D]`."""
    cache = _steps(call, cached, page_size)
    # The kept pages come first, in their order.
    pages = (~kept).int().sort(stable=True, dim=1).indices
    rows = cache.batch, cache.kv_heads
    counts = kept.sum(1, dtype=torch.int32).view(rows)
    query = call.query[0].transpose(0, 1)
    return attend(query, cache, pages.int().view(*rows, -1), counts, call.scaling)[None]


def _steps(call: AttentionCall, cached: int, page_size: int) -> PagedCache:
    """Return the cache of one request as that of many, each with a token more than the one before."""
    steps = call.query.shape[2]
    lengths = torch.arange(cached - steps + 1, cached + 1, dtype=torch.int32, device=call.key.device)
    keys, values = (tensor.expand(steps, -1, -1, -1) for tensor in (call.key, call.value))
    return PagedCache.contiguous(keys, values, lengths, page_size)


def _path(call: AttentionCall, cache: PagedCache, policy: Policy, counts: Tensor | None = None) -> DecodePath:
    budget = policy.budget
    limit: dict[str, float | int | Tensor] = {}
    if counts is not None:
        limit["count"] = counts
    elif isinstance(budget, Coverage):
        limit["gamma"] = budget.gamma
    elif isinstance(budget, Fixed):
        limit["count"] = int(budget.in_pages(cache.page_size))
    return DecodePath(
        cache,
        call.query.shape[1],
        estimator=policy.estimator.name,  # type: ignore[arg-type]
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
