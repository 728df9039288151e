"""Ragged attention over page lists in plain torch; the specification of the kernel."""

import torch
from torch import Tensor

from coverage_lab.kernels.cache import PagedCache, check_query


def attend(query: Tensor, cache: PagedCache, lists: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Return the attention of every row over the pages of its list (paper, Algorithm 2).

    Parameters
    ----------
    query : Tensor
        `[B, query heads, D]`, not scaled.
    cache : PagedCache
        Its `lengths` end the current page.
    lists : Tensor
        `[B, KV heads, width]` int32: pages of each row, each at most once; what lies beyond a row's count is
        not looked at.
    counts : Tensor
        `[B, KV heads]` int32: pages of each list.
    scale : float
        The model's softmax scale s.

    Returns
    -------
    Tensor
        `[B, query heads, D]`; a row without pages gives zeros.
    """
    group = check_query(cache, query)
    # Half precision is computed in float32, as the kernel does.
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query)
    for request in range(cache.batch):
        keys, values = cache.tokens(request)
        place = torch.arange(keys.shape[1], device=query.device)
        for head in range(cache.kv_heads):
            pages = lists[request, head, : max(0, int(counts[request, head]))]
            kept = place[torch.isin(place // cache.page_size, pages)]
            if not len(kept):
                continue
            heads = slice(head * group, (head + 1) * group)
            logits = scale * query[request, heads].to(wide) @ keys[head, kept].to(wide).T
            out[request, heads] = (logits.softmax(-1) @ values[head, kept].to(wide)).to(out.dtype)
    return out
