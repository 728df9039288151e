"""FlashInfer's paged decode on tensor cores, planned on the host for every new set of lists."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from coverage_lab.kernels.baselines import Baseline, baselines, page_sets
from coverage_lab.kernels.cache import PagedCache

WORKSPACE_BYTES = 128 << 20


@baselines.register("flashinfer")
class FlashInfer(Baseline):
    """The given lists, each (request, KV head) as a request of its own.

    `plan` fetches the lists' lengths, builds the index arrays and plans: what a step must do on the host
    before the kernel can start.
    """

    title = "FlashInfer"

    @classmethod
    def missing(cls, cache: PagedCache) -> str | None:
        if cache.key.device.type != "cuda":
            return "needs an NVIDIA GPU"
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer not found: install flashinfer-python"
        if page_sets.rows_as_pool(cache) is None:
            return "needs a pool whose KV heads are whole pages (HND)"
        return None

    def prepare(self) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        views = page_sets.rows_as_pool(self.cache)
        assert views is not None
        self._views = views
        cache = self.cache
        self._places = page_sets.row_places(cache, self.pages, self.counts)
        self._rows = self.query.reshape(cache.rows, -1, cache.head_dim)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.query.device)
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self.plan()

    def plan(self) -> bool:
        cache, counts = self.cache, self.counts.flatten()
        inside = torch.arange(self._places.shape[1], device=counts.device) < counts[:, None]
        last = page_sets.last_tokens(cache).repeat_interleave(cache.kv_heads)
        starts = torch.zeros(cache.rows + 1, dtype=torch.int32)
        starts[1:] = counts.cpu().cumsum(0)
        self._wrapper.plan(
            starts,
            self._places[inside],
            last.int().cpu(),
            self._rows.shape[1],
            1,
            cache.head_dim,
            cache.page_size,
            q_data_type=self.query.dtype,
            kv_data_type=cache.key.dtype,
            sm_scale=self.scale,
        )
        return True

    def run(self) -> Tensor:
        found: Tensor = self._wrapper.run(self._rows, self._views)
        return found.view(self.query.shape)
