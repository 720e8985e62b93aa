"""wgmma.mma_async in native code: a warp notes what it issues, and goes on.

What is noted becomes an operation when the warp commits, in Python (`isa.tensor.warpgroup`).
"""

from __future__ import annotations

from .language import native, ptr, u32
from .layout import PRODUCT_LIMIT, Context, Operation
from .operands import DONE, PYTHON, operand, shared_by_lanes

ALL_LANES = 0xFFFFFFFF


@native
def warpgroup_mma(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """wgmma.mma_async: operands A's and B's descriptors and scale-d.

    form[0]: 1 if A is in registers. form[5]: block.
    """
    queue = c.products
    if lanes != ALL_LANES or not queue or queue.count == PRODUCT_LIMIT:
        return PYTHON
    for i in range(3):
        if not shared_by_lanes(c, lanes, o.operands[i]):
            return PYTHON
    a = operand(c, lanes, o.operands[0])
    b = operand(c, lanes, o.operands[1])
    # A base offset is for Python to refuse.
    if b >> 49 & 7 != 0 or o.form[0] == 0 and a >> 49 & 7 != 0:
        return PYTHON
    place = queue.count
    queue.a[place] = a
    queue.b[place] = b
    queue.accumulate[place] = u32(operand(c, lanes, o.operands[2]))
    queue.block[place] = u32(o.form[5])
    queue.count = place + 1
    return DONE
