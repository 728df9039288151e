"""What is timed: contexts and batches, and the geometry of a layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from coverage_lab.errors import CoverageLabError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """A batch of requests of one context length.

    Attributes
    ----------
    context, batch : int
        Tokens of each request, and requests.
    label : str
        How it was written.
    """

    context: int
    batch: int
    label: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `8kx32` or `8192x32`: tokens of context, then requests.

        A k is 1,024 tokens; only 131k, as the paper writes 131,072 tokens, is not 131 of them.
        """
        label = text.strip().lower()
        match = re.fullmatch(r"(\d+)(k?)x(\d+)", label)
        if match is None or int(match[1]) == 0 or int(match[3]) == 0:
            raise CoverageLabError(f"shape {text!r} is not like 8kx32: tokens of context, then requests")
        tokens = 131_072 if match[1] + match[2] == "131k" else int(match[1]) * (1024 if match[2] else 1)
        return cls(tokens, int(match[3]), label)

    def __str__(self) -> str:
        return self.label or f"{self.context}x{self.batch}"


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One attention layer.

    Attributes
    ----------
    kv_heads, group, head_dim : int
        `group` is the query heads a KV head.
    page_size : int
        Tokens a page.
    dtype : str
        `bfloat16` or `float16`.
    """

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CoverageLabError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        for name in ("kv_heads", "group", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise CoverageLabError(f"--{name.replace('_', '-')} must be positive")

    def page_bytes(self) -> int:
        """Return the bytes of the keys and values of one page of one KV head."""
        return 2 * 2 * self.page_size * self.head_dim

    def pages(self, shape: Shape) -> int:
        """Return the pages of one request."""
        return -(-shape.context // self.page_size)

    def rows(self, shape: Shape) -> int:
        """Return the (request, KV head) pairs."""
        return shape.batch * self.kv_heads

    def dense_bytes(self, shape: Shape) -> int:
        """Return the bytes of all keys and values of a layer."""
        return self.rows(shape) * self.pages(shape) * self.page_bytes()
