"""The merge of what several blocks of `attend` found of a row, done by the block that comes last."""

import triton
import triton.language as tl


@triton.jit
def merge_row(
    parts,
    log_sums,
    out,
    row,
    first,
    last,
    GROUP: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PARTS_TILE: tl.constexpr,
):
    """Write the output of a row from the partial results of blocks `first` to `last`."""
    head = tl.arange(0, HEADS_TILE)
    channel = tl.arange(0, DIM_TILE)
    heads = (head < GROUP)[:, None] & (channel < DIM)[None, :]
    best = tl.full([HEADS_TILE], -1e30, tl.float32)
    mass = tl.zeros([HEADS_TILE], tl.float32)
    sums = tl.zeros([HEADS_TILE, DIM_TILE], tl.float32)
    for begin in tl.range(first, last + 1, PARTS_TILE):
        block = begin + tl.arange(0, PARTS_TILE)
        # The row's first block has it in its second place, all others in their first one.
        slot = (2 * block + (block == first).to(tl.int32)) * GROUP
        held = block <= last
        # Other multiprocessors wrote these: not from the level-1 cache.
        log_sum = tl.load(
            log_sums + slot[:, None] + head[None, :],
            mask=held[:, None] & (head < GROUP)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part = tl.load(
            parts + (slot[:, None] + head[None, :])[:, :, None] * DIM + channel[None, None, :],
            mask=held[:, None, None] & heads[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        top = tl.maximum(best, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - top[None, :])
        fade = tl.exp2(best - top)
        mass = mass * fade + tl.sum(weight, 0)
        sums = sums * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        best = top
    tl.store(
        out + row.to(tl.int64) * (GROUP * DIM) + head[:, None] * DIM + channel[None, :],
        (sums / tl.where(mass > 0, mass, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=heads,
    )
