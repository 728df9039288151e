"""Attention of a decode step over the pages that a policy keeps, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.kernels.estimate.reference import group_shares
from coverage_lab.kernels.select.reference import oracle_counts
from coverage_lab.pages import page_range
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.choice import choose, rows_of

Lists = dict[tuple[int, int], Tensor]
# Coverage of the oracle set that reads are compared with.
ORACLE_GAMMA = 0.95


@dataclass
class Tally:
    """What a policy read, over layers, KV heads and steps.

    Attributes
    ----------
    kept, pages, oracle : int
        Pages kept, pages seen, and those of the oracle sets C*(0.95).
    covered : list of Tensor
        Exact share of the kept pages, `[KV heads]` for every layer and step.
    """

    kept: int = 0
    pages: int = 0
    oracle: int = 0
    covered: list[Tensor] = field(default_factory=list)


class SparseAttention:
    """Stands in for a model's attention while one request decodes.

    Parameters
    ----------
    policy : Policy
    page_size : int
        Tokens a page.
    attend : bool
        Whether to attend the chosen pages only; else the model's own attention stays, and the lists are
        those that its queries would have chosen.
    lists : mapping, optional
        Masks `[KV heads, P]` by (layer, step) that are used as they are.

    Attributes
    ----------
    lists : dict
        The pages kept, by (layer, step).
    tally : Tally
    cached : int
        Tokens in the cache, the new one included; set before every forward call.
    step : int or None
        Decode step; None while the prompt is read.
    """

    def __init__(
        self,
        policy: Policy,
        page_size: int,
        *,
        attend: bool = True,
        lists: Mapping[tuple[int, int], Tensor] | None = None,
    ) -> None:
        self.policy, self.page_size, self.attend = policy, page_size, attend
        self.given = lists
        self.lists: Lists = {}
        self.tally = Tally()
        self.cached = 0
        self.step: int | None = None
        # Given lists need no estimate, only the exact masses that they cover.
        estimated = lists is None and policy.estimator.name != "exact"
        self._recorder = RequestRecorder(page_size, {"estimate": policy.estimator} if estimated else {})

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Take one attention call; the output that stands in for the model's own, or None."""
        if self.step is None:
            self._recorder.see(call, 0, self.cached, None)
            return None
        masses = self._recorder.masses(call, 0, self.cached)
        position = self.cached - 1
        first, n_pages = page_range(position, self.page_size, call.window)
        pages = range(first, first + n_pages)
        rows = rows_of(call.layer, masses.shape[1], position, pages, self.page_size, masses.device)
        place = call.layer, self.step
        kept = choose(self.policy, masses[-1], rows) if self.given is None else self.given[place]
        self.lists[place] = kept
        exact = group_shares(masses[0])
        gamma = torch.tensor([ORACLE_GAMMA], dtype=torch.float64, device=exact.device)
        self.tally.kept += int(kept.sum())
        self.tally.pages += kept.numel()
        self.tally.oracle += int(oracle_counts(exact, rows, gamma).sum())
        self.tally.covered.append(exact.where(kept, 0).sum(-1))
        if not self.attend:
            return None
        return attend_pages(call, kept, pages.start, position, self.page_size)


def attend_pages(call: AttentionCall, kept: Tensor, first_page: int, position: int, page_size: int) -> Tensor:
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
    if call.sinks is not None:
        sinks = call.sinks.float().view(*logits.shape[:2], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return (weights @ values).flatten(0, 1)[None, None].to(call.output.dtype)
