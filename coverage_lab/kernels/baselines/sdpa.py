"""Dense attention with torch's own kernel, on contiguous keys and values."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coverage_lab.kernels.baselines import Baseline, baselines, page_sets


@baselines.register("sdpa")
class Sdpa(Baseline):
    """Keys and values are copied out of the pool beforehand, which is not timed."""

    title = "torch SDPA, dense"
    dense = True

    def prepare(self) -> None:
        cache = self.cache
        self.pages, self.counts = page_sets.every_page(cache)
        longest = int(cache.lengths.max())
        shape = cache.batch, cache.kv_heads, longest, cache.head_dim
        self._key, self._value = self.query.new_zeros(shape), self.query.new_zeros(shape)
        for request in range(cache.batch):
            keys, values = cache.tokens(request)
            self._key[request, :, : keys.shape[1]] = keys
            self._value[request, :, : keys.shape[1]] = values
        place = torch.arange(longest, device=self.query.device)
        inside = place < cache.lengths[:, None]
        self._mask = None if bool(inside.all()) else inside[:, None, None, :]

    def run(self) -> Tensor:
        found = scaled_dot_product_attention(
            self.query[:, :, None],
            self._key,
            self._value,
            attn_mask=self._mask,
            scale=self.scale,
            enable_gqa=True,
        )
        return found[:, :, 0]
