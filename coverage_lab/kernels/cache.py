"""Keys and values where they lie: any layout, by strides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, repr=False)
class PagedCache:
    """Keys and values of a batch, read through strides; nothing is copied.

    Key d of KV head h at token t of page p of request b lies at
    `b * strides[0] + page * strides[1] + t * strides[2] + h * strides[3] + d`, where `page` is `table[b, p]`,
    or p without a table. Use one of the constructors.

    Attributes
    ----------
    key, value : Tensor
        Of one dtype, the channels contiguous.
    key_strides, value_strides : tuple of int
        Elements from one request, page, token and KV head to the next.
    lengths : Tensor
        `[B]` int32 on the device: tokens of each request, the current one included.
    table : Tensor or None
        `[B, pages]` int32: physical page of each page.
    page_size : int
        Tokens a page, S.
    kv_heads, head_dim : int
    max_tokens : int
        Most tokens of a request. Lengths beyond it count as this many, negative ones as none.

    Raises
    ------
    ValueError
        If tensors do not go together; the message begins with the argument's name.
    """

    key: Tensor
    value: Tensor
    key_strides: tuple[int, int, int, int]
    value_strides: tuple[int, int, int, int]
    lengths: Tensor
    table: Tensor | None
    page_size: int
    kv_heads: int
    head_dim: int
    max_tokens: int

    def __post_init__(self) -> None:
        if type(self.page_size) is not int or self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size: {self.page_size} is not one of {PAGE_SIZES}")
        for name, tensor in (("key", self.key), ("value", self.value)):
            if tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}: the channels must be contiguous; their stride is {tensor.stride(-1)}"
                )
        if not self.key.dtype.is_floating_point:
            raise ValueError(f"key: {self.key.dtype} is no floating-point type")
        if self.key.dtype != self.value.dtype or self.key.shape != self.value.shape:
            raise ValueError(
                f"value: {tuple(self.value.shape)} {self.value.dtype} does not go with keys of "
                f"{tuple(self.key.shape)} {self.key.dtype}"
            )
        if self.max_tokens < 1 or not self.key.numel():
            raise ValueError(f"key: {tuple(self.key.shape)} has no room for a token")
        for name in ("value", "lengths", "table"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.key.device:
                raise ValueError(f"{name}: lies on {tensor.device}, the keys on {self.key.device}")

    @classmethod
    def contiguous(cls, key: Tensor, value: Tensor, lengths: Tensor, page_size: int = 64) -> PagedCache:
        """Return the cache of tensors as transformers keeps them.

        Parameters
        ----------
        key, value : Tensor
            `[B, KV heads, T, D]`, T tokens at most; a static cache, since tensors are read where they lie.
        lengths : Tensor
            `[B]` int32: tokens of each request, the current one included.
        page_size : int
            Tokens a page.
        """
        _check_dims(key, value)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size: {page_size!r} is not one of {PAGE_SIZES}")
        batch, kv_heads, tokens, head_dim = key.shape
        _check_numbers("lengths", lengths, batch)
        key_strides, value_strides = (
            (t.stride(0), page_size * t.stride(2), t.stride(2), t.stride(1)) for t in (key, value)
        )
        return cls(
            key, value, key_strides, value_strides, lengths, None, page_size, kv_heads, head_dim, tokens
        )

    @classmethod
    def pool(
        cls, key: Tensor, value: Tensor, lengths: Tensor, table: Tensor, layout: str = "NHD"
    ) -> PagedCache:
        """Return the cache of a pool of pages.

        Parameters
        ----------
        key, value : Tensor
            `[pages, S, KV heads, D]` (NHD) or `[pages, KV heads, S, D]` (HND); views into a pool that keeps
            keys and values side by side (`kv.split(D, -1)`) will do.
        lengths : Tensor
            `[B]` int32.
        table : Tensor
            `[B, pages]` int32: pages of the pool, which is not checked; entries beyond a request's length are
            not looked at.
        layout : {"NHD", "HND"}
        """
        _check_dims(key, value)
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: {layout!r} is not NHD or HND")
        _check_numbers("lengths", lengths, None)
        _check_numbers("table", table, len(lengths), columns=True)
        token, head = (1, 2) if layout == "NHD" else (2, 1)
        key_strides, value_strides = ((0, t.stride(0), t.stride(token), t.stride(head)) for t in (key, value))
        size, kv_heads, head_dim = key.shape[token], key.shape[head], key.shape[3]
        if size not in PAGE_SIZES:
            raise ValueError(f"key: pages of {size} tokens in layout {layout}; {PAGE_SIZES} are possible")
        tokens = table.shape[1] * size
        return cls(key, value, key_strides, value_strides, lengths, table, size, kv_heads, head_dim, tokens)

    @property
    def max_pages(self) -> int:
        """Most pages of a request."""
        return -(-self.max_tokens // self.page_size)

    @property
    def tokens_held(self) -> Tensor:
        """Tokens of each request, `[B]` int64."""
        return self.lengths.long().clamp(0, self.max_tokens)

    @property
    def pages_held(self) -> Tensor:
        """Pages of each request, `[B]` int64; the last one may be partial."""
        return -(-self.tokens_held // self.page_size)

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """(request, KV head) pairs."""
        return self.batch * self.kv_heads

    @property
    def physical_pages(self) -> int:
        """Pages that summaries are kept for: those of the pool, or of all requests."""
        return self.batch * self.max_pages if self.table is None else self.key.shape[0]

    def tokens(self, request: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one request, `[KV heads, T, D]` each; a copy, for references."""
        length = int(self.tokens_held[request])
        position = torch.arange(length, device=self.key.device)
        page = position // self.page_size
        if self.table is not None:
            page = self.table[request].long()[page]
        found = []
        for tensor, strides in ((self.key, self.key_strides), (self.value, self.value_strides)):
            start = request * strides[0] + page * strides[1] + position % self.page_size * strides[2]
            head = torch.arange(self.kv_heads, device=page.device)[:, None, None] * strides[3]
            channel = torch.arange(self.head_dim, device=page.device)
            place = start[:, None] + head + channel + tensor.storage_offset()
            flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            found.append(flat[place])
        return found[0], found[1]


def _check_numbers(name: str, tensor: Tensor, count: int | None, columns: bool = False) -> None:
    """Raise ValueError unless this is int32, `[count]` or `[count, columns]`, the last axis contiguous."""
    wanted = f"[{'B' if count is None else count}{', pages' if columns else ''}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: must be an int32 tensor {wanted}, not {type(tensor).__name__}")
    if tensor.dtype != torch.int32 or tensor.ndim != 1 + columns or count not in (None, len(tensor)):
        raise ValueError(f"{name}: must be int32 {wanted}, not {tensor.dtype} {tuple(tensor.shape)}")
    if not tensor.numel():
        raise ValueError(f"{name}: {tuple(tensor.shape)} holds nothing")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: its last axis must be contiguous; the stride is {tensor.stride(-1)}")


def _check_dims(key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: must be a tensor, not {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ValueError(f"{name}: must have 4 dimensions, not {tensor.ndim}")


def check_kernel(cache: PagedCache, query_heads: int) -> int:
    """Return the query heads a KV head, or raise ValueError for what the kernels can't take."""
    group = check_heads(cache, query_heads)
    if cache.head_dim not in HEAD_DIMS:
        raise ValueError(f"key: head dimension {cache.head_dim} is not one of {HEAD_DIMS}")
    if cache.key.dtype not in DTYPES:
        raise ValueError(f"key: {cache.key.dtype} is not bfloat16 or float16")
    return group


def check_heads(cache: PagedCache, query_heads: int, name: str = "query_heads") -> int:
    """Return the query heads a KV head, or raise ValueError if they are not as many for each."""
    if type(query_heads) is not int:
        raise ValueError(f"{name}: {query_heads!r} is no whole number")
    group, rest = divmod(query_heads, cache.kv_heads)
    if rest:
        raise ValueError(f"{name}: {query_heads} heads are no multiple of {cache.kv_heads} KV heads")
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{name}: {group} heads for each KV head; 1 to {MAX_GROUP} are possible")
    return group


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the softmax scale, or raise ValueError if it is none."""
    if scale is None:
        return float(head_dim**-0.5)
    if not isinstance(scale, Real) or not 0 < scale < math.inf:
        raise ValueError(f"scale: {scale!r} is not a positive number")
    return float(scale)


def check_out(out: Tensor, query: Tensor) -> None:
    """Raise ValueError if a result for this query can't be written there."""
    if not isinstance(out, Tensor):
        raise ValueError(f"out: must be a tensor, not {type(out).__name__}")
    if (out.shape, out.dtype, out.device) != (query.shape, query.dtype, query.device):
        raise ValueError(f"out: {tuple(out.shape)} {out.dtype} on {out.device} is not like the query")
    if not out.is_contiguous():
        raise ValueError("out: must be contiguous")


def check_geometry(head_dim: int, page_size: int, group: int) -> None:
    """Raise ValueError for a geometry that the kernels can't take, before there are any tensors."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: {head_dim} is not one of {HEAD_DIMS}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size: {page_size} is not one of {PAGE_SIZES}")
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"group: {group} query heads a KV head; 1 to {MAX_GROUP} are possible")


def check_query(cache: PagedCache, query: Tensor) -> int:
    """Return the query heads a KV head, or raise ValueError if the query does not go with the cache."""
    if not isinstance(query, Tensor):
        raise ValueError(f"query: must be a tensor, not {type(query).__name__}")
    if query.ndim != 3 or query.shape[0] != cache.batch or query.shape[2] != cache.head_dim:
        raise ValueError(
            f"query: must be [{cache.batch}, query heads, {cache.head_dim}], not {tuple(query.shape)}"
        )
    if query.dtype != cache.key.dtype:
        raise ValueError(f"query: {query.dtype}, the keys are {cache.key.dtype}")
    if query.device != cache.key.device:
        raise ValueError(f"query: lies on {query.device}, the keys on {cache.key.device}")
    if query.stride(-1) != 1:
        raise ValueError(f"query: the channels must be contiguous; their stride is {query.stride(-1)}")
    return check_heads(cache, query.shape[1], "query")
