"""Page summaries as a Triton kernel, for all full pages of a prefill at once."""

import triton
import triton.language as tl


@triton.jit
def page_summary(keys, KIND: tl.constexpr):
    """Return both halves of the summary of a page from its keys `[S, D]` in float32."""
    if KIND == "quest":
        return tl.min(keys, 0), tl.max(keys, 0)
    mean = tl.sum(keys, 0) / keys.shape[0]
    off = keys - mean[None, :]
    return mean, tl.sum(off * off, 0) / keys.shape[0]


@triton.jit
def store_summary(to, values, inside):
    """Store half a summary; what float16 can't hold becomes its largest number, not infinity."""
    if to.dtype.element_ty == tl.float16:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    tl.store(to, values.to(to.dtype.element_ty), mask=inside)


@triton.jit
def summarize_kernel(
    key,
    lengths,
    max_tokens,
    table,
    summary,
    key_batch,
    key_page,
    key_token,
    key_head,
    table_row,
    max_pages,
    kv_heads,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0)
    page = tl.program_id(1)
    request = row // kv_heads
    head = row % kv_heads
    if (page + 1) * PAGE > tl.minimum(tl.load(lengths + request), max_tokens):
        return
    if HAS_TABLE:
        held = tl.load(table + request.to(tl.int64) * table_row + page).to(tl.int64)
        place = held
    else:
        held = page.to(tl.int64)
        place = request.to(tl.int64) * max_pages + page
    token = tl.arange(0, PAGE)
    channel = tl.arange(0, DIM_TILE)
    keys = tl.load(
        key
        + request.to(tl.int64) * key_batch
        + held * key_page
        + head.to(tl.int64) * key_head
        + token[:, None] * key_token
        + channel[None, :],
        mask=(channel < DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    first, second = page_summary(keys, KIND)
    at = summary + (place * kv_heads + head) * (2 * DIM) + channel
    store_summary(at, first, channel < DIM)
    store_summary(at + DIM, second, channel < DIM)
