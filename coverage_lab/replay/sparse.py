"""Attention of a decode step over the pages that a policy keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import oracle_counts
from coverage_lab.pages import Rows, page_range
from coverage_lab.replay.choice import Choice, Selector
from coverage_lab.replay.kernel import KernelAttention

Lists = dict[tuple[int, int], Tensor]
# Coverage of the oracle set that reads are compared with.
ORACLE_GAMMA = 0.95


class Tally:
    """What a policy read, over layers, KV heads and steps; counted on the device.

    Attributes
    ----------
    counts : dict of str to Tensor
        `kept` and `pages`: pages kept and seen; `oracle`: those of the oracle sets C*(0.95); `values` and
        `dense_values`: read besides keys and values, and read by dense attention; `rows` and `equal`: rows
        whose lists were chosen twice, and those that came out alike.
    covered : list of Tensor
        Exact share of the kept pages, `[layers, KV heads]` for every step and kind of layer.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Tensor | int] = {}
        self.covered: list[Tensor] = []

    def add(self, **counts: Tensor | int) -> None:
        """Add to the counts."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def taken(self) -> dict[str, int]:
        """Return the counts of the steps that have ended; this waits for the device."""
        return {name: int(value) for name, value in self.counts.items()}


class SparseAttention:
    """Stands in for a model's attention while one request decodes.

    Parameters
    ----------
    selector : Selector
    attend : bool
        Whether to attend the chosen pages only; else the model's own attention stays, and the lists are
        those that its queries would have chosen.
    lists : mapping, optional
        Masks `[KV heads, P]` by (layer, step) that are used as they are.
    kernels : KernelAttention, optional
        Runs the attention, and the choice where it can; plain torch by default.
    check : bool
        Whether to choose in plain torch too where the kernels do, and to count the rows that are alike.

    Attributes
    ----------
    lists : dict
        The pages kept, by (layer, step).
    tally : Tally
    """

    def __init__(
        self,
        selector: Selector,
        *,
        attend: bool = True,
        lists: Mapping[tuple[int, int], Tensor] | None = None,
        kernels: KernelAttention | None = None,
        check: bool = False,
    ) -> None:
        self.selector, self.attend = selector, attend
        self.given, self.kernels, self.check = lists, kernels, check
        self.lists: Lists = {}
        self.tally = Tally()
        self._pending: list[tuple[Tensor, Choice]] = []
        self._cached = 0
        self._step: int | None = None

    def begin(self, cached: int, step: int | None) -> None:
        """Say that a forward call begins: tokens in the cache after it, and the step (None: the prompt)."""
        self.end()
        self._cached, self._step = cached, step
        if self.kernels is not None and step is not None:
            self.kernels.lengths.fill_(cached)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Take one attention call; the output that stands in for the model's own, or None."""
        if self._step is None:
            self.selector.see(call, self._cached)
            return None
        choice, output = self._chosen(call)
        self.lists[call.layer, self._step] = choice.kept
        self._count(call, choice)
        if not self.attend or output is not None:
            return output
        policy = self.selector.policy
        if call.layer in policy.dense_layers:
            return None
        if self.kernels is not None:
            return self.kernels.attend(call, choice.kept)
        position, size = self._cached - 1, self.selector.page_size
        first, _ = page_range(position, size, call.window)
        masses = choice.estimate if policy.compensate else None
        return attend_pages(call, choice.kept, first, position, size, masses)

    def _chosen(self, call: AttentionCall) -> tuple[Choice, Tensor | None]:
        """Return the choice, and the output where one call of the kernels gives both."""
        selector, cached = self.selector, self._cached
        policy = selector.policy
        if self.given is not None:
            assert self._step is not None
            kept = self.given[call.layer, self._step]
            if policy.compensate:
                return replace(selector.choose(call, cached), kept=kept), None
            return selector.measure(call, cached, kept), None
        if self.kernels is None or not self.kernels.selects or call.layer in policy.dense_layers:
            return selector.choose(call, cached), None
        output = self.kernels(call)
        kept = self.kernels.kept(call.layer, cached)
        if not self.check:
            return selector.measure(call, cached, kept), output
        choice = selector.choose(call, cached)
        self.tally.add(rows=len(kept), equal=(choice.kept == kept).all(-1).sum())
        return replace(choice, kept=kept), output

    def _count(self, call: AttentionCall, choice: Choice) -> None:
        self._pending.append((group_shares(choice.exact), choice))
        pages = choice.kept.numel()
        self.tally.add(
            pages=pages,
            values=choice.values,
            dense_values=pages * 2 * self.selector.page_size * call.key.shape[-1],
        )

    def end(self) -> None:
        """Count what the calls since the last `begin` kept: all layers of a step at once."""
        alike: dict[int, list[tuple[Tensor, Choice]]] = {}
        for exact, choice in self._pending:
            alike.setdefault(exact.shape[1], []).append((exact, choice))
        for parts in alike.values():
            exact = torch.cat([shares for shares, _ in parts])
            kept = torch.cat([choice.kept for _, choice in parts])
            first = parts[0][1].rows
            rows = Rows(
                **{
                    name: torch.cat([getattr(choice.rows, name) for _, choice in parts])
                    for name in ("n_pages", "first_page", "position", "layer", "kv_head")
                },
                page_size=first.page_size,
                fewest=first.fewest,
            )
            gamma = torch.tensor([ORACLE_GAMMA], dtype=torch.float64, device=exact.device)
            self.tally.add(kept=kept.sum(), oracle=oracle_counts(exact, rows, gamma).sum())
            covered = exact.where(kept, 0).sum(-1)
            self.tally.covered.append(covered.view(len(parts), -1))
        self._pending.clear()


def attend_pages(
    call: AttentionCall,
    kept: Tensor,
    first_page: int,
    position: int,
    page_size: int,
    estimate: Tensor | None = None,
) -> Tensor:
    """Return the attention of a decode call over some pages, `[1, 1, query heads, D]`.

    Parameters
    ----------
    call : AttentionCall
        One request, one new token.
    kept : Tensor
        `[KV heads, P]` bool, pages from `first_page` on.
    first_page, position : int
        Number of the oldest page, and position of the query.
    page_size : int
    estimate : Tensor, optional
        `[KV heads, G, P]`: log masses with which the other pages take part, at the mean of their values.
    """
    held = min(position + 1, call.key.shape[-2])
    keys, values = call.key[0, :, :held].float(), call.value[0, :, :held].float()
    places = torch.arange(position + 1 - held, position + 1, device=keys.device)
    seen = places >= (0 if call.window is None else position - call.window + 1)
    page = (places // page_size - first_page).clamp(min=0)
    visible = kept[:, page] & seen
    query = call.query[0, :, 0].float().unflatten(0, (keys.shape[0], -1)) * call.scaling
    logits = query @ keys.transpose(-1, -2)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    if estimate is not None:
        of_page = torch.nn.functional.one_hot(page, kept.shape[1]).where(seen[:, None], 0).float()
        means = (of_page / of_page.sum(0).clamp(min=1)).T @ values
        logits = torch.cat([logits, estimate.masked_fill(kept[:, None], -torch.inf)], -1)
        values = torch.cat([values, means], 1)
    if call.sinks is not None:
        sinks = call.sinks.float().view(*logits.shape[:2], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return (weights @ values).flatten(0, 1)[None, None].to(call.value.dtype)
