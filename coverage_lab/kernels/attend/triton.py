"""Self-planning ragged attention as a Triton kernel (paper 3.3, with an even split in place of Eq. 4).

The grid is fixed. Each block reads the page counts of all rows, lays the rows end to end, and takes an equal
part of the pages: no block waits for a longer one, whatever the counts are, and no host is asked. A row that
lies within one block is written at once; of a row that several blocks share, each writes a partial result,
and `merge` puts them together. A block shares at most two rows with others, the one it begins with and the
one it ends with, so there are two places for partial results a block.
"""

import triton
import triton.language as tl


@triton.jit
def load_query(query, row, kv_heads, query_batch, query_head, head, channel, GROUP: tl.constexpr, inside):
    """Return the queries of a row, `[GROUP_TILE, DIM_TILE]`."""
    first = query + (row // kv_heads).to(tl.int64) * query_batch + (row % kv_heads) * GROUP * query_head
    return tl.load(first + head[:, None] * query_head + channel[None, :], mask=inside, other=0.0)


@triton.jit
def attend_kernel(
    query,
    key,
    value,
    lists,
    counts,
    out,
    parts,
    log_sums,
    first_page,
    share,
    scale_log2,
    query_batch,
    query_head,
    key_batch,
    key_page,
    key_token,
    key_head,
    value_batch,
    value_page,
    value_token,
    value_head,
    list_row,
    rows,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # All blocks run at once, so those of the merge can come and wait: they read nothing meanwhile.
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    every_row = tl.arange(0, ROWS_TILE)
    pages = tl.load(counts + every_row, mask=every_row < rows, other=0)
    ends = tl.cumsum(pages, 0)
    total = tl.sum(pages, 0)
    # LEAST pages a block at least: small steps are not cut into crumbs.
    per_block = tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST)
    if block == 0:
        tl.store(share, per_block)
    place = block * per_block
    stop = tl.minimum(place + per_block, total)
    if place >= stop:
        return
    row = tl.sum((ends <= place).to(tl.int32), 0)
    index = place - tl.sum(tl.where(every_row < row, pages, 0), 0)
    entered = index

    head = tl.arange(0, GROUP_TILE)
    channel = tl.arange(0, DIM_TILE)
    token = tl.arange(0, PAGE)
    inside = channel < DIM
    heads = (head < GROUP)[:, None] & inside[None, :]
    q = load_query(query, row, kv_heads, query_batch, query_head, head, channel, GROUP, heads)
    entry = tl.load(lists + row.to(tl.int64) * list_row + index)
    row_pages = tl.load(counts + row)
    best = tl.full([GROUP_TILE], -1e30, tl.float32)
    mass = tl.zeros([GROUP_TILE], tl.float32)
    sums = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for i in tl.range(place, stop, num_stages=STAGES):
        page = (entry >> 8).to(tl.int64)
        here = token < (entry & 255)
        request = (row // kv_heads).to(tl.int64)
        kv_head = (row % kv_heads).to(tl.int64)
        key_at = key + request * key_batch + kv_head * key_head + page * key_page + token * key_token
        value_at = (
            value + request * value_batch + kv_head * value_head + page * value_page + token * value_token
        )
        k = tl.load(key_at[None, :] + channel[:, None], mask=here[None, :] & inside[:, None], other=0.0)
        v = tl.load(value_at[:, None] + channel[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        # What the next iteration reads is known one iteration ahead: were its entry loaded where it is used,
        # its keys could not be fetched early.
        leaves = index + 1 == row_pages
        next_row = tl.minimum(row + leaves.to(tl.int32), rows - 1)
        next_index = tl.where(leaves, 0, index + 1)
        next_entry = tl.load(lists + next_row.to(tl.int64) * list_row + next_index)
        next_pages = tl.load(counts + next_row)

        logits = tl.where(here[None, :], tl.dot(q, k) * scale_log2, float("-inf"))
        top = tl.maximum(best, tl.max(logits, 1))
        weight = tl.exp2(logits - top[:, None])
        fade = tl.exp2(best - top)
        mass = mass * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        best = top
        if leaves | (i + 1 == stop):
            # A row without tokens has no mass, and gives zeros.
            result = sums / tl.where(mass > 0, mass, 1.0)[:, None]
            if index + 1 - entered == row_pages:
                tl.store(
                    out + row.to(tl.int64) * (GROUP * DIM) + head[:, None] * DIM + channel[None, :],
                    result.to(out.dtype.element_ty),
                    mask=heads,
                )
            else:
                # The first place is for a row that began before, the second for one that goes on.
                slot = (2 * block + (entered == 0).to(tl.int32)) * GROUP + head
                tl.store(parts + slot[:, None] * DIM + channel[None, :], result, mask=heads)
                tl.store(log_sums + slot, best + tl.log2(mass), mask=head < GROUP)
            if entered == 0:
                tl.store(first_page + row, i - index)
            entered = 0
            q = load_query(query, next_row, kv_heads, query_batch, query_head, head, channel, GROUP, heads)
            best = tl.full([GROUP_TILE], -1e30, tl.float32)
            mass = tl.zeros([GROUP_TILE], tl.float32)
            sums = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
        row = next_row
        index = next_index
        row_pages = next_pages
        entry = next_entry
