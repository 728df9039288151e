"""Layers to time a kernel on: keys and values in a page pool, one pool a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coverage_lab.bench.shapes import DTYPES, Geometry, Shape
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.baselines.page_sets import to_lists
from coverage_lab.kernels.cache import PagedCache

# What one pass over the layers reads is this many times the level-2 cache at least, so that it starts cold.
CACHES = 4
MOST_LAYERS = 64


@dataclass(frozen=True)
class Layer:
    """The query, keys and values of a decode step in one layer."""

    query: Tensor
    cache: PagedCache

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.cache.head_dim**-0.5


def how_many(bytes_a_layer: int, held_bytes: int, device: torch.device) -> int:
    """Return how many layers leave nothing of one in the level-2 cache until its turn comes again.

    Parameters
    ----------
    bytes_a_layer : int
        What a call reads of a layer.
    held_bytes : int
        What a layer takes in memory, all in all.
    """
    if device.type != "cuda":
        return 1
    room = int(0.8 * torch.cuda.mem_get_info(device)[0]) // held_bytes
    if room < 1:
        raise CoverageLabError(
            f"one layer takes {held_bytes / 2**30:.1f} GiB, more than the GPU has free; take a smaller shape"
        )
    wanted = -(-CACHES * torch.cuda.get_device_properties(device).L2_cache_size // bytes_a_layer) + 1
    return max(1, min(wanted, room, MOST_LAYERS))


def make(shape: Shape, geometry: Geometry, device: torch.device, count: int, seed: int) -> list[Layer]:
    """Return layers of random keys and values; as in a model they share lengths and page table.

    The pool is `[pages, KV heads, S, 2 D]`, keys and values side by side; the table is a random permutation,
    and the current page is not full. Pages differ from each other, and KV heads in how sharply they attend.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[geometry.dtype]
    pages, heads, size, dim = geometry.pages(shape), geometry.kv_heads, geometry.page_size, geometry.head_dim
    pool = shape.batch * pages
    table = torch.randperm(pool, generator=generator, device=device).view(shape.batch, pages).int()
    # Of a current page that has few tokens one is left.
    tokens = max((pages - 1) * size + 1, shape.context - size // 8)
    lengths = torch.full((shape.batch,), tokens, dtype=torch.int32, device=device)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, device=device, dtype=dtype).normal_(generator=generator)

    layers = []
    for _ in range(count):
        held = normal(pool, heads, size, 2 * dim)
        key, value = held.split(dim, -1)
        key += normal(pool, heads, 1, dim)
        # Standard deviation of a head's log masses over pages, by KV head: from nearly flat to peaked.
        sharp = 1 + 4 * torch.rand(shape.batch, heads, 1, 1, generator=generator, device=device)
        # The query heads of a group look for much the same.
        query = 0.9 * normal(shape.batch, heads, 1, dim) + 0.4 * normal(
            shape.batch, heads, geometry.group, dim
        )
        query = query * sharp.to(dtype)
        cache = PagedCache.pool(key, value, lengths, table, "HND")
        layers.append(Layer(query.flatten(1, 2), cache))
    return layers


def lists_of(cache: PagedCache, counts: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """Return ascending lists of random pages, the sink first and the current page last.

    `counts` is `[B, KV heads]`; returns `[B, KV heads, max pages]` and `[B, KV heads]` int32 on the device.
    """
    device = cache.key.device
    generator = torch.Generator(device).manual_seed(seed)
    pages = cache.max_pages
    score = torch.rand(*counts.shape, pages, generator=generator, device=device)
    score[..., 0], score[..., -1] = 3.0, 2.0
    rank = score.argsort(-1, descending=True).argsort(-1)
    wanted = torch.from_numpy(counts).to(device)
    kept = rank < wanted[..., None]
    return to_lists(kept)


def spread(counts: np.ndarray | Sequence[int]) -> float:
    """Return the coefficient of variation of list lengths."""
    values = np.asarray(counts, float)
    return float(values.std() / values.mean()) if values.size and values.mean() else math.nan
