"""The merge of what several blocks of `attend` found of a row, as a Triton kernel."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    parts,
    log_sums,
    counts,
    first_page,
    share,
    out,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    per_block = tl.load(share)
    start = tl.load(first_page + row)
    first = start // per_block
    last = (start + tl.load(counts + row) - 1) // per_block
    if first < last:
        channel = tl.arange(0, DIM_TILE)
        # Not -inf: parts of pages without tokens have that.
        best = -1e30
        mass = 0.0
        sums = tl.zeros([DIM_TILE], tl.float32)
        for begin in tl.range(first, last + 1, PARTS_TILE):
            block = begin + tl.arange(0, PARTS_TILE)
            held = block <= last
            slot = (2 * block + (block == first).to(tl.int32)) * GROUP + head
            log_sum = tl.load(log_sums + slot, mask=held, other=float("-inf"))
            part = tl.load(
                parts + slot[:, None] * DIM + channel[None, :],
                mask=held[:, None] & (channel < DIM)[None, :],
                other=0.0,
            )
            top = tl.maximum(best, tl.max(log_sum, 0))
            weight = tl.exp2(log_sum - top)
            fade = tl.exp2(best - top)
            mass = mass * fade + tl.sum(weight, 0)
            sums = sums * fade + tl.sum(part * weight[:, None], 0)
            best = top
        tl.store(
            out + (row.to(tl.int64) * GROUP + head) * DIM + channel,
            (sums / tl.where(mass > 0, mass, 1.0)).to(out.dtype.element_ty),
            mask=channel < DIM,
        )
