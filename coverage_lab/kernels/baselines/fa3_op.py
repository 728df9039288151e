"""FlashAttention-3 where vLLM brings it, as a torch operator."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coverage_lab.kernels.cache import PagedCache

# A file to load in place of vLLM's.
VARIABLE = "COVERAGE_LAB_FA3_SO"
NEEDS_POOL = "needs a page pool"


@cache
def library() -> Path | None:
    """Return the shared library of FA3, or None where there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) if Path(named).is_file() else None
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("vllm_flash_attn/_vllm_fa3_C*.so")):
            return found
    return None


def missing(cache: PagedCache) -> str | None:
    """Return why FA3 can't run here, or None."""
    if cache.key.device.type != "cuda":
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(cache.key.device)[0] != 9:
        return "needs a GPU of compute capability 9 (H100, H200)"
    if library() is None:
        return f"FlashAttention-3 not found: install vllm, or set {VARIABLE} to its _vllm_fa3_C.abi3.so"
    return NEEDS_POOL if cache.table is None else None


@cache
def operator() -> Any:
    """Return the namespace of the operator."""
    torch.ops.load_library(str(library()))
    return torch.ops._vllm_fa3_C


class Sequences:
    """Sequences over a pool of pages, one query token each.

    Parameters
    ----------
    query : Tensor
        `[sequences, heads, D]`.
    key, value : Tensor
        `[pages, S, KV heads, D]`.
    table : Tensor
        `[sequences, width]` int32.
    tokens : Tensor
        `[sequences]` int32.
    scale : float
    out : Tensor, optional
        Where results go.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        tokens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> None:
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.table, self.tokens = table.contiguous(), tokens.contiguous()
        self.starts = torch.arange(len(tokens) + 1, device=tokens.device, dtype=torch.int32)
        self.out = torch.empty_like(query) if out is None else out
        self.most = table.shape[1] * key.shape[1]
        self.splits: Tensor | None = None

    def schedule(self) -> None:
        """Let FA3 decide how to split the sequences: device work, which depends on their lengths."""
        sequences, heads, dim = self.query.shape
        size, kv_heads = self.key.shape[1:3]
        self.splits = operator().get_scheduler_metadata(
            sequences, 1, self.most, heads, kv_heads, dim, dim, self.query.dtype, self.tokens,
            self.starts, None, None, None, None, size, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip

    def run(self) -> Tensor:
        """Return `[sequences, heads, D]`."""
        found: Tensor = operator().fwd(
            self.query, self.key, self.value, None, None, None, self.out, self.starts, None, None, None,
            self.tokens, 1, self.most, self.table, None, None, None, None, None, None, None, None,
            self.scale, True, -1, -1, 0.0, True, self.splits, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return found
