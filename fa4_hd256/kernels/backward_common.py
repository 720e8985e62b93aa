"""What the kernels that make gradients share on every architecture.

With s = softmax_scale q k (capped or not), P = exp(s - LSE), dP = dO V^T and
delta = rowsum(dO O) - dLSE::

    dS = P (dP - delta) (1 - tanh^2, with a softcap)
    dV = P^T dO      dQ = softmax_scale dS K      dK = softmax_scale dS^T Q

P and dS are kept in 16 bits, unscaled, as operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32

from .scalars import CallScalars

__all__ = ["BackwardTensors", "Step", "heads_of_part", "heads_per_part"]

class BackwardTensors(NamedTuple):
    """What a kernel reads and writes.

    loads: TMA tensors in the order of the kernel's `boxes`, of (seqlen, 256, heads, batch) or for
    ragged sequences of a `clipped_view` of it.  stats: (2, heads, padded rows) float32:
    -LSE log2(e), then -delta, of each query row (`Sequences.padded_query_offset`).
    results: (seqlen, 256, heads, batch) each.  ds: see `backward_ds_tiles`, None where it is
    not stored.
    """

    loads: tuple
    stats: Any
    results: tuple
    ds: Any
    ragged: Any


class Step:
    """Queries of one query head that a tile of keys meets: (head, which of them, counted in the
    kernel's steps); lives across loops.

    span: [begin, end) of the steps of each head, which a loop over them does not change.
    """

    def __init__(self, head: Int32, index: Int32, span: tuple[Int32, Int32]) -> None:
        self.head, self.index, self.span = head, index, span

    def following(self) -> Step:
        """The next step of the head, else the first of the next head."""
        begin, end = self.span
        wraps = self.index + 1 == end
        head = self.head + Int32(wraps)
        return Step(head, cutlass.select_(wraps, begin, self.index + 1), self.span)

    def __extract_mlir_values__(self) -> list:
        return [*cutlass.extract_mlir_values(self.head), *cutlass.extract_mlir_values(self.index)]

    def __new_from_mlir_values__(self, values: list) -> Step:
        head, index = values
        return Step(
            cutlass.new_from_mlir_values(self.head, [head]),
            cutlass.new_from_mlir_values(self.index, [index]),
            self.span,
        )


def heads_per_part(scalars: CallScalars, heads_per_kv: Any) -> Any:
    """Query heads of a part of a KV head's group; the last part may have fewer, or none."""
    return (heads_per_kv + scalars.head_parts - 1) // scalars.head_parts


def heads_of_part(context: Any, head: Int32) -> tuple[Int32, Int32]:
    """(first query head, how many) of a part.  head: KV head * head_parts + part."""
    per_part = heads_per_part(context.scalars, context.heads_per_kv)
    kv_head, part = head // context.scalars.head_parts, head % context.scalars.head_parts
    begin = part * per_part
    count = cutlass.max(cutlass.min(per_part, context.heads_per_kv - begin), 0)
    return kv_head * context.heads_per_kv + begin, count
