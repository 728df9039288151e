"""Log masses of pages as a Triton kernel: from summaries, but for the sink and the current page."""

import triton
import triton.language as tl

from coverage_lab.kernels.summarize.triton import page_summary, store_summary


@triton.jit
def estimate_kernel(
    query,
    key,
    lengths,
    max_tokens,
    table,
    summary,
    log_mass,
    scale,
    query_batch,
    query_head,
    key_batch,
    key_page,
    key_token,
    key_head,
    table_row,
    max_pages,
    kv_heads,
    mass_row,
    mass_head,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LOG_PAGE: tl.constexpr,
    PAGES_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0)
    # Parts 0 and 1 read the keys of the sink and of the current page; the others take the tiles of summaries
    # between them in turn.
    part = tl.program_id(1)
    request = row // kv_heads
    kv_head = row % kv_heads
    # Where the first tile lies is asked for before the length is known: one wait instead of two.
    begin = tl.maximum(part - 2, 0) * PAGES_TILE
    offset = tl.arange(0, PAGES_TILE)
    mapped = table + request.to(tl.int64) * table_row
    home = begin + offset
    if HAS_TABLE:
        home = tl.load(mapped + home, mask=home < max_pages, other=0)
    length = tl.maximum(tl.minimum(tl.load(lengths + request), max_tokens), 0)
    last = tl.cdiv(length, PAGE) - 1
    if (last < 0) | ((part == 1) & (last == 0)) | ((part >= 2) & (begin >= last)):
        return
    head = tl.arange(0, GROUP_TILE)
    channel = tl.arange(0, DIM_TILE)
    inside = channel < DIM
    heads = head < GROUP
    q = tl.load(
        query
        + request.to(tl.int64) * query_batch
        + (kv_head * GROUP + head)[:, None] * query_head
        + channel[None, :],
        mask=heads[:, None] & inside[None, :],
        other=0.0,
    )
    masses = log_mass + row.to(tl.int64) * mass_row + head[:, None] * mass_head
    if part < 2:
        token = tl.arange(0, PAGE)
        exact = part * last
        held = tl.load(mapped + exact) if HAS_TABLE else exact
        here = exact * PAGE + token < length
        keys = tl.load(
            key
            + request.to(tl.int64) * key_batch
            + held.to(tl.int64) * key_page
            + kv_head.to(tl.int64) * key_head
            + token[:, None] * key_token
            + channel[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        )
        logits = tl.where(here[None, :], tl.dot(q, tl.trans(keys)) * scale, float("-inf"))
        top = tl.max(logits, 1)
        log_sum = top + tl.log(tl.sum(tl.exp(logits - top[:, None]), 1))
        tl.store(masses + exact, log_sum[:, None], mask=heads[:, None])
        if (exact + 1) * PAGE == length:
            # The step has filled its page: from the next one on a summary stands for it.
            low, high = page_summary(keys.to(tl.float32), KIND)
            filled = held.to(tl.int64) if HAS_TABLE else request.to(tl.int64) * max_pages + exact
            to = summary + (filled * kv_heads + kv_head) * (2 * DIM) + channel
            store_summary(to, low, inside)
            store_summary(to + DIM, high, inside)
    else:
        zero = tl.zeros_like(q)
        if KIND == "mvar":
            scaled = q.to(tl.float32) * scale
            # The factor of the variance as a sum of two numbers of the cache's dtype: 16 bits of it.
            factor = 0.5 * scaled * scaled
            coarse = factor.to(q.dtype)
            fine = (factor - coarse.to(tl.float32)).to(q.dtype)
        elif KIND == "quest":
            above = tl.where(q > 0, q, zero)
            below = tl.where(q < 0, q, zero)
        stride = (tl.num_programs(1) - 2) * PAGES_TILE
        for first_page in tl.range(begin, last, stride, num_stages=STAGES):
            page = first_page + offset
            known = (page > 0) & (page < last)
            place = home.to(tl.int64)
            if HAS_TABLE == 0:
                place += request.to(tl.int64) * max_pages
            tile = summary + ((place * kv_heads + kv_head) * (2 * DIM))[:, None] + channel[None, :]
            wanted = known[:, None] & inside[None, :]
            first = tl.load(tile, mask=wanted, other=0.0)
            # Where the next summaries lie is known one iteration ahead, so that they can be fetched early.
            home = page + stride
            if HAS_TABLE:
                home = tl.load(mapped + home, mask=home < last, other=0)
            if KIND == "mean":
                mass = tl.dot(q, tl.trans(first)) * scale
            else:
                second = tl.load(tile + DIM, mask=wanted, other=0.0)
                if KIND == "mvar":
                    spread = tl.dot(fine, tl.trans(second), tl.dot(coarse, tl.trans(second)))
                    mass = tl.dot(q, tl.trans(first)) * scale + spread
                else:
                    mass = tl.dot(below, tl.trans(first), tl.dot(above, tl.trans(second))) * scale
            tl.store(masses + page[None, :], mass + LOG_PAGE, mask=heads[:, None] & known[None, :])
