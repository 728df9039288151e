"""The coverage rule and the fixed count as a Triton kernel: Algorithm 1 on fixed-point shares, a block a row.

Shares are in units of 2**-30, so that sums are exact and the set is that of the reference, whatever the
order of the sums. The search ends when no two pages lie between its bounds.
"""

import triton
import triton.language as tl


@triton.jit
def select_kernel(
    log_mass,
    lengths,
    max_tokens,
    table,
    budget,
    entries,
    pages,
    counts,
    reads,
    budget_row,
    table_row,
    kv_heads,
    mass_row,
    mass_head,
    list_row,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    EAGER: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // kv_heads
    length = tl.maximum(tl.minimum(tl.load(lengths + request), max_tokens), 0)
    asked = tl.load(budget + row * budget_row)
    n_pages = tl.cdiv(length, PAGE)
    place = tl.arange(0, WIDTH)
    valid = place < n_pages
    # What is needed last is asked for first: it arrives meanwhile.
    seen = tl.load(reads + 2 * row + tl.arange(0, 2))
    if HAS_TABLE:
        held = tl.load(table + request.to(tl.int64) * table_row + place, mask=valid, other=0)
    else:
        held = place
    share = tl.zeros([WIDTH], tl.float32)
    for start in tl.static_range(0, GROUP, HEADS_TILE):
        head = start + tl.arange(0, HEADS_TILE)
        mass = tl.load(
            log_mass + row.to(tl.int64) * mass_row + head[:, None] * mass_head + place[None, :],
            mask=(head < GROUP)[:, None] & (place < list_row if EAGER else valid)[None, :],
            other=float("-inf"),
        )
        mass = tl.where(valid[None, :], mass, float("-inf"))
        weight = tl.exp(mass - tl.maximum(tl.max(mass, 1), -1e30)[:, None])
        total = tl.maximum(tl.sum(weight, 1), 1e-30)
        share += tl.sum(weight / total[:, None], 0)
    units = share * (1073741824.0 / GROUP)
    # Round half to even; from 2**23 on a float32 is whole.
    units = tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units)
    units = tl.where(valid, units, 0.0).to(tl.int32)
    forced = valid & ((place == 0) | (place == n_pages - 1))
    n_forced = tl.minimum(n_pages, 2)
    others = tl.where(valid & (forced == 0), units, -1)

    # `got` is what lies at a threshold and above: pages in the fixed-count mode, else their shares.
    if BY_COUNT:
        target = tl.minimum(asked, n_pages.to(tl.float64)).to(tl.int32) - n_forced
        got_low = n_pages - n_forced
        low = 0
    else:
        # One sum for both: the shares of all pages below, those of the forced ones above.
        both = tl.sum(units.to(tl.int64) + (tl.where(forced, units, 0).to(tl.int64) << 32), 0)
        of_forced = (both >> 32).to(tl.int32)
        total = (both & 0xFFFFFFFF).to(tl.int32)
        target = tl.ceil(total.to(tl.float64) * asked).to(tl.int32) - of_forced
        got_low = total - of_forced
        # What may be left out, over the pages: were all that lie below this left out, it would still do.
        low = tl.maximum(got_low - target, 0) // tl.maximum(n_pages - n_forced, 1)
    got_high = 0
    high = tl.maximum(tl.max(others, 0), 0) + 1
    low = tl.minimum(low, high - 1)
    part = (1 + tl.arange(0, THRESHOLDS)).to(tl.float32) / (THRESHOLDS + 1)
    # Two pages between the bounds have twice the lower bound at least.
    open_ = got_low - got_high > 1 if BY_COUNT else got_low - got_high - low >= low
    while (high - low > 1) & open_:
        # Shares spread over orders of magnitude: thresholds do too, until the bounds are close.
        floor = tl.maximum(low, 1).to(tl.float32)
        span = (high - low).to(tl.float32)
        spread = tl.where(
            high // 4 > low, floor * tl.exp2(tl.log2(high / floor) * part), low.to(tl.float32) + span * part
        )
        tried = tl.minimum(tl.maximum(spread.to(tl.int32), low + 1), high - 1)
        above = others[None, :] >= tried[:, None]
        got = tl.sum(tl.where(above, 1 if BY_COUNT else others[None, :], 0), 1)
        # A threshold and what it gets, in one integer: the largest that gets enough, the least that does not.
        pair = (tried.to(tl.int64) << 32) | got.to(tl.int64)
        enough = got >= target
        best = tl.max(tl.where(enough, pair, (low.to(tl.int64) << 32) | got_low.to(tl.int64)), 0)
        next_ = tl.min(tl.where(enough, (high.to(tl.int64) << 32) | got_high.to(tl.int64), pair), 0)
        low = (best >> 32).to(tl.int32)
        got_low = (best & 0xFFFFFFFF).to(tl.int32)
        high = (next_ >> 32).to(tl.int32)
        got_high = (next_ & 0xFFFFFFFF).to(tl.int32)
        open_ = got_low - got_high > 1 if BY_COUNT else got_low - got_high - low >= low
    tied = (others >= low) & (others < high)
    before = tl.zeros([WIDTH], tl.int32)
    if open_:
        # Several pages of one share: the first ones, as many as it takes.
        before = tl.cumsum(tied.to(tl.int32), 0) - 1
        if BY_COUNT == 0:
            before = before * low
    keep = forced | (others >= high) | (tied & (before < target - got_high))
    if BY_COUNT == 0:
        keep = tl.where(asked >= 1.0, valid, keep)
    slot = tl.cumsum(keep.to(tl.int32), 0) - 1
    tokens = tl.minimum(length - place * PAGE, PAGE)
    at = row.to(tl.int64) * list_row + slot
    tl.store(pages + at, place, mask=keep)
    tl.store(entries + at, held * 256 + tokens, mask=keep)
    count = tl.sum(keep.to(tl.int32), 0)
    # A row without tokens has an entry too, of none.
    tl.store(entries + row.to(tl.int64) * list_row, 0, mask=length == 0)
    tl.store(counts + row, tl.maximum(count, 1))
    tl.store(reads + 2 * row + tl.arange(0, 2), seen + tl.where(tl.arange(0, 2) == 0, count, n_pages))
