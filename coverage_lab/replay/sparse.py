"""Attention of decode steps over the pages that a policy keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import oracle_counts
from coverage_lab.replay.choice import Choice, Selector
from coverage_lab.replay.kernel import attend_lists, select_and_attend, selects

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
        Exact share of the kept pages, `[rows]` for every layer and block of steps.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Tensor | int] = {}
        self.covered: list[Tensor] = []

    def add(self, **counts: Tensor | int) -> None:
        """Add to the counts."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def taken(self) -> dict[str, int]:
        """Return the counts; this waits for the device."""
        return {name: int(value) for name, value in self.counts.items()}


class SparseAttention:
    """Stands in for a model's attention while one request decodes, some steps at a time.

    Parameters
    ----------
    selector : Selector
    attend : bool
        Whether to attend the chosen pages only; else the model's own attention stays, and the lists are
        those that its queries would have chosen.
    lists : mapping, optional
        Masks `[rows, P]` by layer and first step that are used as they are.
    kernels : bool
        Whether the kernels run the attention, and the choice where they can; plain torch by default.
    check : bool
        Whether to choose in plain torch too where the kernels do, and to count the rows that are alike.

    Attributes
    ----------
    lists : dict
        The pages chosen, by layer and first step, where they are not attended.
    tally : Tally
    """

    def __init__(
        self,
        selector: Selector,
        *,
        attend: bool = True,
        lists: Mapping[tuple[int, int], Tensor] | None = None,
        kernels: bool = False,
        check: bool = False,
    ) -> None:
        self.selector, self.attend = selector, attend
        self.given, self.kernels, self.check = lists, kernels, check
        self.lists: Lists = {}
        self.tally = Tally()
        self._cached = 0
        self._step: int | None = None

    def begin(self, cached: int, step: int | None) -> None:
        """Say that a forward call begins: tokens in the cache after it, and its first step (None: prompt)."""
        self._cached, self._step = cached, step

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Take one attention call; the output that stands in for the model's own, or None."""
        if self._step is None:
            self.selector.see(call, self._cached)
            return None
        choice, output = self._chosen(call)
        if not self.attend:
            self.lists[call.layer, self._step] = choice.kept
        self._count(call, choice)
        policy = self.selector.policy
        if not self.attend or output is not None:
            return output
        if call.layer in policy.dense_layers:
            return None
        if self.kernels:
            return attend_lists(call, choice.kept, self._cached, self.selector.page_size)
        return choice.block.attend(choice.kept, choice.estimate if policy.compensate else None)

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
        if not self.kernels or not selects(policy) or call.layer in policy.dense_layers:
            return selector.choose(call, cached), None
        output, kept = select_and_attend(call, policy, cached, selector.page_size)
        if not self.check:
            return selector.measure(call, cached, kept), output
        choice = selector.choose(call, cached)
        self.tally.add(rows=len(kept), equal=(choice.kept == kept).all(-1).sum())
        return replace(choice, kept=kept), output

    def _count(self, call: AttentionCall, choice: Choice) -> None:
        rows, exact = choice.block.geometry.rows, group_shares(choice.block.exact)
        gamma = torch.tensor([ORACLE_GAMMA], dtype=torch.float64, device=exact.device)
        pages = rows.n_pages.sum()
        self.tally.add(
            kept=choice.kept.sum(),
            pages=pages,
            oracle=oracle_counts(exact, rows, gamma).sum(),
            values=choice.values,
            dense_values=pages * 2 * self.selector.page_size * call.key.shape[-1],
        )
        self.tally.covered.append(exact.where(choice.kept, 0).sum(-1))
