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
    table,
    budget,
    entries,
    pages,
    counts,
    reads,
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
):
    row = tl.program_id(0)
    request = row // kv_heads
    length = tl.load(lengths + request)
    n_pages = tl.cdiv(length, PAGE)
    place = tl.arange(0, WIDTH)
    valid = place < n_pages
    share = tl.zeros([WIDTH], tl.float32)
    for start in tl.static_range(0, GROUP, HEADS_TILE):
        head = start + tl.arange(0, HEADS_TILE)
        mass = tl.load(
            log_mass + row.to(tl.int64) * mass_row + head[:, None] * mass_head + place[None, :],
            mask=(head < GROUP)[:, None] & valid[None, :],
            other=float("-inf"),
        )
        weight = tl.exp(mass - tl.maximum(tl.max(mass, 1), -1e30)[:, None])
        total = tl.maximum(tl.sum(weight, 1), 1e-30)
        share += tl.sum(weight / total[:, None], 0)
    units = share * (1073741824.0 / GROUP)
    # Round half to even; from 2**23 on a float32 is whole.
    units = tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units)
    units = tl.where(valid, units, 0.0).to(tl.int32)
    forced = valid & ((place == 0) | (place == n_pages - 1))
    others = tl.where(valid & (forced == 0), units, -1)
    n_forced = tl.sum(forced.to(tl.int32), 0)
    asked = tl.load(budget)
    if BY_COUNT:
        target = tl.minimum(asked, n_pages.to(tl.float64)).to(tl.int32) - n_forced
    else:
        total = tl.sum(units, 0).to(tl.float64)
        target = tl.ceil(total * asked).to(tl.int32) - tl.sum(tl.where(forced, units, 0), 0)

    # At `low` and above lies what is asked for, at `high` and above less than that.
    at_low = n_pages - n_forced
    at_high = 0
    got_high = 0
    if BY_COUNT:
        low = 0
    else:
        # What may be left out, over the pages: were all that lie below this left out, it would still do.
        spare = tl.sum(tl.maximum(others, 0), 0) - target
        low = tl.maximum(spare, 0) // tl.maximum(at_low, 1)
    high = tl.maximum(tl.max(others, 0), 0) + 1
    low = tl.minimum(low, high - 1)
    step = tl.arange(0, THRESHOLDS)
    counted = others.to(tl.int64) + (1 << 32)
    while (high - low > 1) & (at_low - at_high > 1):
        # Shares spread over orders of magnitude: thresholds do too, until the bounds are close.
        even = low + ((high - low).to(tl.int64) * step // THRESHOLDS).to(tl.int32)
        ratio = tl.log2(high.to(tl.float32) / (low + 1).to(tl.float32)) / THRESHOLDS
        spread = ((low + 1).to(tl.float32) * tl.exp2(ratio * step.to(tl.float32))).to(tl.int32)
        tried = tl.where((step > 0) & (high // 4 > low), tl.minimum(tl.maximum(spread, low), high - 1), even)
        above = others[None, :] >= tried[:, None]
        # One sum for both: pages in the upper half, their shares in the lower one.
        both = tl.sum(tl.where(above, counted[None, :], 0), 1)
        number = (both >> 32).to(tl.int32)
        got = (both & 0xFFFFFFFF).to(tl.int32)
        if BY_COUNT:
            got = number
        last = tl.maximum(tl.sum((got >= target).to(tl.int32), 0), 1) - 1
        is_last = step == last
        is_next = step == last + 1
        if last + 1 < THRESHOLDS:
            high = tl.sum(tl.where(is_next, tried, 0), 0)
            at_high = tl.sum(tl.where(is_next, number, 0), 0)
            got_high = tl.sum(tl.where(is_next, got, 0), 0)
        low = tl.sum(tl.where(is_last, tried, 0), 0)
        at_low = tl.sum(tl.where(is_last, number, 0), 0)
    over = others >= high
    tied = (others >= low) & (others < high)
    before = tl.cumsum(tied.to(tl.int32), 0) - 1
    if BY_COUNT == 0:
        before = before * low
    keep = forced | over | (tied & (before < target - got_high))
    if BY_COUNT == 0:
        keep = tl.where(asked >= 1.0, valid, keep)
    count = tl.sum(keep.to(tl.int32), 0)
    slot = tl.cumsum(keep.to(tl.int32), 0) - 1
    if HAS_TABLE:
        held = tl.load(table + request.to(tl.int64) * table_row + place, mask=keep, other=0)
    else:
        held = place
    tokens = tl.minimum(length - place * PAGE, PAGE)
    at = row.to(tl.int64) * list_row + slot
    tl.store(pages + at, place, mask=keep)
    tl.store(entries + at, held * 256 + tokens, mask=keep)
    # A row without tokens still has an entry, of none.
    tl.store(entries + row.to(tl.int64) * list_row, 0, mask=length == 0)
    tl.store(counts + row, tl.maximum(count, 1))
    tl.atomic_add(reads, count.to(tl.int64))
    tl.atomic_add(reads + 1, n_pages.to(tl.int64))
