"""Context of the warp roles of a forward kernel, on every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...schedulers.protocol import WorkTile
from ..context import KernelContext
from ..mask.masking import KvSplit
from ..operands import TmaTensor
from ..problem_class import OptionalTensors
from ..rows.output_gate import row_of_gate
from ..rows.scheduler_metadata import SchedulerMetadata
from ..rows.sequences import Sequence, scale_of


class ForwardKernelTensors(NamedTuple):
    """Tensors that a forward kernel reads and writes. An operand is (seqlen, 256, heads, batch), or
    for ragged sequences a `clipped_view` of it. With packed heads q and o are views by
    `by_packed_heads`, clipped where packed sequences need it."""

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    #: The result as TMA stores it; None where it does not, as with split keys.
    o: TmaTensor | None
    #: (seqlen, 256, heads, batch); with split keys float32, with a batch entry for each KV split.
    out: cute.Tensor
    #: (batch, heads, seqlen) float32; with split keys a batch entry for each KV split.
    lse: cute.Tensor
    optional: OptionalTensors
    #: The greatest logit of each query, like `lse`; None unless the problem class has `max_logits`.
    row_maxima: cute.Tensor | None = None
    #: Gate of the result, like `q`, where TMA loads it.
    gate: TmaTensor | None = None


@dataclass(frozen=True)
class ForwardContext(KernelContext):
    """State that every warp role of one CTA of a forward kernel shares."""

    tensors: ForwardKernelTensors
    #: (heads,) float32 logits of the attention sink, as they are given; None without a sink.
    sink: cute.Tensor | None = None
    #: KV splits of each batch entry; None: keys are not split.  A batch entry of the scheduler is
    #: one split then: entry n has number n % num_splits of the call's entry n // num_splits.  With
    #: scheduler metadata (`listed`) entries have splits of their own number: num_splits is the
    #: number of splits that the list has room for, and the list says whose entry n is.  The
    #: results have a batch entry for each split in both cases.
    num_splits: Int32 | None = None
    #: Scales of Q, K and V in e4m3, None where the call has none: (entries, heads_kv) float32, of
    #: sequences, or of pages where the problem class says so; a side of size 1 has one for all.
    q_descale: cute.Tensor | None = None
    k_descale: cute.Tensor | None = None
    v_descale: cute.Tensor | None = None
    #: Gate of the result as `output_gate.by_rows` has it, None without one; gate_form: whether an
    #: element or a head has a value of it (`GATE_OF_ELEMENTS`, `GATE_OF_HEADS`).
    out_gate: cute.Tensor | None = None
    gate_form: str = ""

    @property
    def listed(self) -> SchedulerMetadata | None:
        """The list of all parts, None where each batch entry has as many."""
        words = self.sequences.tensors.scheduler_metadata
        return None if words is None else SchedulerMetadata(words, self.num_splits)

    def batch(self, work: WorkTile) -> Int32:
        if self.num_splits is None:
            return work.batch
        if (listed := self.listed) is not None:
            return listed.sequence(work.batch)
        return work.batch // self.num_splits

    def part(self, work: WorkTile) -> KvSplit | None:
        if self.num_splits is None:
            return None
        if (listed := self.listed) is not None:
            return listed.part(work.batch)
        number = work.batch % self.num_splits
        keys = self.scalars.part_keys
        if cutlass.const_expr(keys is None):
            return KvSplit(number, self.num_splits)
        return KvSplit(number, None, keys, number + 1 == self.num_splits)

    def score_descale(self, work: WorkTile) -> Float32 | None:
        """Return the scale of a tile's scores, that of Q times that of K; None without scales."""
        if self.q_descale is None:
            return None
        entry, head = self.batch(work), work.head // self.heads_per_kv
        return scale_of(self.q_descale, entry, head) * scale_of(self.k_descale, entry, head)

    def value_descale(self, work: WorkTile) -> Float32 | None:
        """Return the scale of a tile's V; None without scales."""
        if self.q_descale is None:
            return None
        return scale_of(self.v_descale, self.batch(work), work.head // self.heads_per_kv)

    def query(self, work: WorkTile) -> Sequence:
        return self.sequences.query(self.batch(work))

    def key(self, work: WorkTile) -> Sequence:
        return self.sequences.key(self.batch(work))

    def result_batch(self, work: WorkTile) -> Int32:
        if cutlass.const_expr(self.listed is not None):
            return work.batch
        batch, part = self.query(work).batch, self.part(work)
        return batch if part is None else batch * self.num_splits + part.number

    def result_offset(self, queries: Sequence) -> Int32:
        """Return the row of the first of a batch entry's queries in the results."""
        if cutlass.const_expr(self.listed is not None):
            return Int32(0)
        return queries.offset

    def gate_row(self, work: WorkTile, query: Int32, head: Int32) -> Any:
        """Return the gate of a row that exists, as `output_gate.row_of_gate` does."""
        queries = self.query(work)
        place = queries.offset + query
        return row_of_gate(self.gate_form, self.out_gate, place, head, queries.batch)

    def result_row(self, work: WorkTile, query: Int32, head: Int32) -> cute.Tensor:
        """Return (256,) of `out` in global memory."""
        place = self.result_offset(self.query(work)) + query
        return self.tensors.out[place, None, head, self.result_batch(work)]
