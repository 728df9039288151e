"""Turn the attention calls of a decode into log masses of pages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.summaries import PageSummaries
from coverage_lab.kernels.estimate.reference import page_logits
from coverage_lab.pages import page_range
from coverage_lab.policies.estimators import Estimator


class RequestRecorder:
    """Log masses of one request, kept on the model's device until they are taken.

    Parameters
    ----------
    page_size : int
        Tokens a page.
    estimators : mapping of str to Estimator
        Estimates to record beside the exact mass.
    padding : int
        Padding tokens that stand before the request in its batch.
    tensor_steps : collection of int
        Steps whose q, k and v are kept as well.
    """

    def __init__(
        self,
        page_size: int,
        estimators: Mapping[str, Estimator],
        padding: int = 0,
        tensor_steps: Collection[int] = (),
    ) -> None:
        self.page_size = page_size
        self.estimators = dict(estimators)
        self.padding = padding
        self.tensor_steps = frozenset(tensor_steps)
        self.tensors: dict[str, Tensor] = {}
        self.bytes = 0
        self._summaries = [PageSummaries(estimator, page_size) for estimator in self.estimators.values()]
        self._masses: dict[int, list[Tensor]] = defaultdict(list)

    def see(self, call: AttentionCall, row: int, cached: int, step: int | None) -> None:
        """Take one attention call.

        Parameters
        ----------
        call : AttentionCall
            The call of the whole batch.
        row : int
            Place of the request in the batch.
        cached : int
            Tokens in the cache, padding and new tokens included.
        step : int or None
            Decode step, or None while the prompt is read.
        """
        keys, visible, oldest, tokens = self._visible(call, row, cached)
        for summaries in self._summaries:
            summaries.extend(call.layer, keys, oldest)
        if step is not None:
            mass = self._log_mass(call, row, keys, oldest, tokens)
            self._masses[call.layer].append(mass)
            self.bytes += mass.numel() * mass.element_size()
            if step in self.tensor_steps:
                self._keep_tensors(call, row, visible, step)

    def _visible(self, call: AttentionCall, row: int, cached: int) -> tuple[Tensor, slice, int, int]:
        """Return the request's keys, where they lie, the token of the first one, and how many there were."""
        # A static cache is longer than what it holds, and a batch is padded on the left.
        held = min(cached, call.key.shape[-2])
        visible = slice(max(0, self.padding - (cached - held)), held)
        keys = call.key[row, :, visible]
        tokens = cached - self.padding
        return keys, visible, tokens - keys.shape[-2], tokens

    def take(self) -> dict[int, list[Tensor]]:
        """Return and forget the log masses so far.

        Returns
        -------
        dict of int to list of Tensor
            For every layer a tensor `[1 + estimators, KV heads, G, pages]` a step, the exact mass first.
        """
        masses = dict(self._masses)
        self._masses.clear()
        self.bytes = 0
        return masses

    def _log_mass(self, call: AttentionCall, row: int, keys: Tensor, oldest: int, tokens: int) -> Tensor:
        size = self.page_size
        position = tokens - 1
        first, n_pages = page_range(position, size, call.window)
        visible = 0 if call.window is None else max(0, position - call.window + 1)
        keys = keys[:, max(0, visible - oldest) :].float()
        query = (
            call.query[row, :, 0].unflatten(0, (keys.shape[0], -1)).float() * call.scaling
        )  # [KV heads, G, D]
        # Tokens of the first page that the window has left behind.
        gone = visible - first * size
        logits = page_logits(query, keys, size, gone, call.softcap)
        exact = logits.logsumexp(-1)
        # Not an index of two places: that would wait for the device.
        ends = torch.stack([logits[..., 0, :], logits[..., -1, :]], -2)
        masses = [exact]
        for summaries in self._summaries:
            estimator = summaries.estimator
            known = estimator.pool(ends)
            pages = summaries.pages(call.layer, first, first + n_pages - 1)
            if pages is None:
                masses.append(known[..., -1:])
                continue
            mass = estimator.log_mass(query, pages)
            if call.softcap is not None:
                logit = mass - math.log(size)
                mass = call.softcap * torch.tanh(logit / call.softcap) + math.log(size)
            if gone:
                mass[..., 0] += math.log((size - gone) / size)
            if first == 0:
                mass[..., 0] = known[..., 0]  # the sink page
            masses.append(torch.cat([mass, known[..., -1:]], -1))  # and the current page are exact
        return torch.stack(masses)

    def _keep_tensors(self, call: AttentionCall, row: int, visible: slice, step: int) -> None:
        parts = {"q": call.query[row, :, 0], "k": call.key[row, :, visible], "v": call.value[row, :, visible]}
        for name, tensor in parts.items():
            self.tensors[f"{name}.{call.layer}.{step}"] = tensor.to("cpu", copy=True).contiguous()
