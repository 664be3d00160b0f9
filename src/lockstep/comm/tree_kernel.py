"""The Triton kernel of TreeSum. Imported only when a fold on a CUDA device needs it: Triton is not installed everywhere.

Each addition is rounded to the dtype of the values, as torch's own: bfloat16 and float16 are added and multiplied in float32 and
rounded to nearest even. An addition and a multiplication of its result cannot be contracted to one rounding: a fused
multiply-add multiplies first.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.tree_sum import UNIT

_BLOCK_BYTES = 4096


@triton.jit(do_not_specialize=["units"])
def _add_up(
    values,
    out,
    units,
    scale,
    COUNT: tl.constexpr,
    ADDS: tl.constexpr,
    ROOT: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_HALF: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    length = units.to(tl.int64) * UNIT  # so that the compiler knows that it can read whole words
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (tl.load(values + k * length + at, mask=inside),)
    for k in tl.static_range(len(ADDS)):
        left, right = rows[ADDS[k][0]], rows[ADDS[k][1]]
        node = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype) if IS_HALF else left + right
        rows = rows[: ADDS[k][0]] + (node,) + rows[ADDS[k][0] + 1 :]
    total = rows[ROOT]
    if IS_SCALED:
        total = (total.to(tl.float32) * scale).to(total.dtype) if IS_HALF else total * scale
    tl.store(out + at, total, mask=inside)


def make_kernel(
    count: int, adds: tuple[tuple[int, int], ...], root: int, is_scaled: bool
) -> Callable[[Tensor, Tensor, float], None]:
    """Returns a kernel for values whose rows are of whole units. The first call for a dtype compiles it."""

    def run(values: Tensor, out: Tensor, scale: float) -> None:
        length, item = out.numel(), out.element_size()
        block = _BLOCK_BYTES // item
        _add_up[(-(-length // block),)](values, out, length // UNIT, scale, count, adds, root, is_scaled, item == 2, UNIT, block)

    return run
