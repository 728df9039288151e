"""Some decode steps of one request in one layer, all at once.

The tokens of a replay are known beforehand. Since attention is causal, all of them can go through a layer
together: every step sees the keys that it would have seen alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.summaries import PageSummaries
from coverage_lab.pages import Rows, page_range


@dataclass(frozen=True)
class Geometry:
    """Which pages the steps of a block see.

    Attributes
    ----------
    pages : range
        Absolute numbers of all pages that any step sees.
    shift : Tensor
        `[T]` int64: the first page of each step, counted from the first of all.
    current : Tensor
        `[T]` int64: the page of each step's own token, counted so.
    gone : Tensor
        `[T]` int64: tokens of its first page that a step's sliding window has left behind.
    seen : Tensor
        `[T, pages * S]` bool: the tokens that each step sees.
    rows : Rows
        `T` times the KV heads, step after step.
    width : int
        Pages of the longest row.
    moves : bool
        Whether the steps begin at different pages.
    """

    pages: range
    shift: Tensor
    current: Tensor
    gone: Tensor
    seen: Tensor
    rows: Rows
    width: int
    moves: bool


def geometry(
    cached: int,
    steps: int,
    window: int | None,
    page_size: int,
    layer: int,
    kv_heads: int,
    device: torch.device,
) -> Geometry:
    """Return the geometry of the last `steps` tokens of `cached`, for one layer."""
    found = _of_every_layer(cached, steps, window, page_size, kv_heads, device)
    layers = torch.full_like(found.rows.layer, layer)
    return replace(found, rows=replace(found.rows, layer=layers))


# Layers with the same window differ in their number alone; the rest is made once.
@functools.lru_cache(maxsize=8)
def _of_every_layer(
    cached: int, steps: int, window: int | None, page_size: int, kv_heads: int, device: torch.device
) -> Geometry:
    positions = range(cached - steps, cached)
    ranges = [page_range(position, page_size, window) for position in positions]
    base = ranges[0][0]
    pages = range(base, (cached - 1) // page_size + 1)
    oldest = [0 if window is None else max(0, position - window + 1) for position in positions]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    tokens = torch.arange(pages.start * page_size, pages.stop * page_size, device=device)
    at, since = tensor(list(positions))[:, None], tensor(oldest)[:, None]
    first, counts = (tensor([pair[part] for pair in ranges]) for part in (0, 1))
    rows = Rows(
        n_pages=counts.repeat_interleave(kv_heads),
        first_page=first.repeat_interleave(kv_heads),
        position=at[:, 0].repeat_interleave(kv_heads),
        layer=torch.zeros(steps * kv_heads, dtype=torch.long, device=device),
        kv_head=torch.arange(kv_heads, device=device).repeat(steps),
        page_size=page_size,
        fewest=min(count for _, count in ranges),
    )
    return Geometry(
        pages=pages,
        shift=first - base,
        current=at[:, 0] // page_size - base,
        gone=since[:, 0] - first * page_size,
        seen=(tokens <= at) & (tokens >= since),
        rows=rows,
        width=max(count for _, count in ranges),
        moves=len({start for start, _ in ranges}) > 1,
    )


class Block:
    """Logits and values of one call, page by page.

    Parameters
    ----------
    call : AttentionCall
        Of one request; its last tokens are the steps.
    cached : int
        Tokens in the cache after the call.
    page_size : int
        Tokens a page.

    Attributes
    ----------
    cached : int
    geometry : Geometry
    query : Tensor
        `[KV heads, G, T, D]` float32, scaled.
    logits : Tensor
        `[KV heads, G, T, pages, S]` float32; minus infinity where a step sees no key.
    """

    def __init__(self, call: AttentionCall, cached: int, page_size: int) -> None:
        self._call, self.cached, self.page_size = call, cached, page_size
        kv_heads, steps = call.key.shape[1], call.query.shape[2]
        self.geometry = geometry(cached, steps, call.window, page_size, call.layer, kv_heads, call.key.device)
        pages = self.geometry.pages
        held = min(cached, call.key.shape[2])
        oldest = cached - held
        start = max(0, pages.start * page_size - oldest)
        self._padding = oldest + start - pages.start * page_size, pages.stop * page_size - cached
        self._keys = slice(start, held)
        self.query = call.query[0].float().unflatten(0, (kv_heads, -1)) * call.scaling
        logits = self.query @ call.key[0, :, None, self._keys].float().mT
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = F.pad(logits, self._padding).masked_fill(~self.geometry.seen, -torch.inf)
        self.logits = logits.unflatten(-1, (-1, page_size))

    @functools.cached_property
    def exact(self) -> Tensor:
        """`[rows, G, P]`: exact log masses, minus infinity beyond a row."""
        return self.to_rows(self.logits.logsumexp(-1))

    def estimate(self, summaries: PageSummaries) -> Tensor:
        """Return the estimated log masses, `[rows, G, P]`; the sink and the current page are exact.

        `summaries` hold all pages that are full after the call.
        """
        shape, estimator = self.geometry, summaries.estimator
        known = estimator.pool(self.logits)
        full = (
            int(shape.seen.shape[1] + shape.pages.start * self.page_size - self._padding[1]) // self.page_size
        )
        summary = summaries.pages(self._call.layer, shape.pages.start, full)
        if summary is None:
            return self.to_rows(known)
        mass = estimator.log_mass(self.query.flatten(1, 2), summary)
        mass = mass.unflatten(1, self.query.shape[1:3])
        softcap, size = self._call.softcap, self.page_size
        if softcap is not None:
            logit = mass - math.log(size)
            mass = softcap * torch.tanh(logit / softcap) + math.log(size)
        place = torch.arange(mass.shape[-1], device=mass.device)
        first = place == shape.shift[:, None]
        if self._call.window is not None:
            left = ((size - shape.gone) / size).log()[:, None]
            mass = mass + left.where(first, 0)
        estimated = (place >= shape.shift[:, None]) & (place < shape.current[:, None])
        if shape.pages.start == 0:
            estimated &= place > 0
        known = known.clone()
        known[..., : len(place)] = mass.where(estimated, known[..., : len(place)])
        return self.to_rows(known)

    def attend(self, kept: Tensor, estimate: Tensor | None = None) -> Tensor:
        """Return the attention over pages kept, `[1, T, query heads, D]`.

        Parameters
        ----------
        kept : Tensor
            `[rows, P]` bool.
        estimate : Tensor, optional
            `[rows, G, P]`: log masses with which the other pages take part, at the mean of their values.
        """
        call, size = self._call, self.page_size
        values = F.pad(call.value[0, :, self._keys].float(), (0, 0, *self._padding))  # [KV heads, tokens, D]
        kept = self._to_pages(kept[:, None], False)  # [KV heads, 1, T, pages]
        logits = self.logits.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        rest = None
        if estimate is not None:
            rest = self._to_pages(estimate, -torch.inf).masked_fill(kept, -torch.inf)
            logits = torch.cat([logits, rest], -1)
        if call.sinks is not None:
            sinks = call.sinks.float().view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
            weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        tokens = values.shape[1]
        output = weights[..., :tokens] @ values[:, None]
        if rest is not None:
            seen = self.geometry.seen.unflatten(-1, (-1, size)).float()
            counts = seen.sum(-1).clamp(min=1)
            means = torch.einsum("tps,hpsd->htpd", seen, values.unflatten(1, (-1, size)))
            means = means / counts[..., None]
            output = output + torch.einsum("hgtp,htpd->hgtd", weights[..., tokens:], means)
        return output.flatten(0, 1).transpose(0, 1)[None].to(call.value.dtype)

    def to_rows(self, masses: Tensor) -> Tensor:
        """Return `[KV heads, G, T, pages]` as `[rows, G, P]`, each row from its own first page on."""
        shape = self.geometry
        rows = masses.permute(2, 0, 1, 3)
        if shape.moves:
            place = torch.arange(shape.width, device=masses.device) + shape.shift[:, None]
            index = place.clamp(max=masses.shape[-1] - 1)[:, None, None].expand(*rows.shape[:3], -1)
            rows = rows.gather(-1, index).masked_fill((place >= masses.shape[-1])[:, None, None], -torch.inf)
        return rows.flatten(0, 1)

    def _to_pages(self, rows: Tensor, outside: float | bool) -> Tensor:
        """Return `[rows, G, P]` as `[KV heads, G, T, pages]`; `outside` stands beyond a row."""
        shape = self.geometry
        steps, pages = len(shape.shift), len(shape.pages)
        found = rows.unflatten(0, (steps, -1))
        if shape.moves:
            place = torch.arange(pages, device=rows.device) - shape.shift[:, None]
            inside = (place >= 0) & (place < rows.shape[-1])
            index = place.clamp(0, rows.shape[-1] - 1)[:, None, None].expand(*found.shape[:3], -1)
            found = found.gather(-1, index).masked_fill(~inside[:, None, None], outside)
        return found.permute(1, 2, 0, 3)
