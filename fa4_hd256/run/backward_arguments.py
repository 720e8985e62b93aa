"""Arguments of the backward's kernels in a plan: slots, as of `arguments`, in the order of
`argument_types`, NOTE [arguments of the backward]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..call.backward_problem import BackwardProblem
from ..call.chunks import Chunk
from ..gpus.devices import Gpu
from ..kernels.block_scales import ATOM_ROWS, MXFP8_GRADIENT_OPERANDS
from ..kernels.limits import SECTOR_BYTES, TMA_ALIGNMENT
from ..kernels.rows.sequences import PADDING, SequenceTensors
from ..kernels.small.backward_preprocess import PreprocessRows
from .argument_types import SCALE_RANK, WORD
from .arguments import STREAM, aligned_view, call_scalars, gate_value, optional_values


def padded_rows(num_rows: int, num_sequences: int, packed: bool) -> int:
    """Rows of a tensor in which every query sequence begins at a multiple of `PADDING` rows and
    may be written up to one.

    num_rows: of the whole batch if packed, else of each sequence.  Sequence b of a packed batch
    begins at (cu_seqlens_q[b] + b * PADDING) rounded down to PADDING: one block more for each
    sequence makes room for its rest, and the host need not know any length.
    """
    if packed:
        num_rows, num_sequences = num_rows + num_sequences * PADDING, 1
    return num_sequences * (-(-num_rows // PADDING) * PADDING)


def preprocess_call_arguments(
    rows: PreprocessRows, stats: Any, ragged: Mapping[str, Any], problem: BackwardProblem, gpu: Gpu
) -> tuple[Any, ...]:
    """Return the preprocess kernel's arguments. rows: views as kernels may read them. ragged: views
    by name, those of `PreprocessClass.ragged` among them."""
    out, dout, lse, dlse, *gates = rows
    checked = PreprocessRows(
        aligned_view(out, TMA_ALIGNMENT),
        aligned_view(dout, TMA_ALIGNMENT),
        _row_values(lse),
        None if dlse is None else _row_values(dlse),
        *(None if gate is None else gate_value(gate) for gate in gates),
    )
    own = {name: aligned_view(ragged[name], WORD) for name in problem.preprocess_class.ragged}
    scalars = call_scalars(problem.preprocess_class, problem.forward, gpu, problem)
    lengths = SequenceTensors(**own) if own else None
    return checked, aligned_view(stats, WORD), lengths, scalars, STREAM


def sum_call_arguments(parts: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    made = (tuple(aligned_view(t, SECTOR_BYTES) for t in pair) for pair in (parts, results))
    return *made, STREAM


def _row_values(tensor: Any) -> Any:
    """A tensor of one float per row, with a last stride of 1."""
    return aligned_view(tensor.unsqueeze(-1), WORD)


@dataclass(frozen=True)
class GradientTensors:
    """Views of the tensors of one call of a kernel that makes gradients."""

    #: q, k, v, dout; in mxfp8 the codes, then the scales of `MXFP8_GRADIENT_OPERANDS`.
    operands: tuple[Any, ...]
    stats: Any
    #: In the order of the kernel (`kernel_set.BackwardKernel`).
    results: tuple[Any, ...]
    #: Those of `OptionalTensors`, by name; a kernel gets what its problem class requests of them.
    optional: Mapping[str, Any] = field(default_factory=dict)
    #: None where it is not stored.
    ds: Any = None

    def of(self, chunk: Chunk, names: tuple[str, ...]) -> GradientTensors:
        """Views of a chunk but for its lists; dS is the start of a one-dimensional `ds`."""
        q, k = self.operands[:2]
        heads_kv, entries = k.shape[2], chunk.problem.forward.q_shape[0]

        def part(tensor: Any, heads: range, each: int, rows: range) -> Any:
            tensor = _narrowed(tensor, 2, heads, each)
            if entries < q.shape[0]:
                tensor = _narrowed(tensor, 0, chunk.sequences)
            return _narrowed(tensor, 1, rows)

        def of_queries(tensor: Any) -> Any:
            return part(tensor, chunk.heads, 1, chunk.queries)

        def of_keys(tensor: Any) -> Any:
            return part(tensor, chunk.heads_kv, tensor.shape[2] // heads_kv, chunk.keys)

        def scales_of(tensor: Any, like: Any, heads: range, rows: range) -> Any:
            """Narrow scales of blocks, (batch, heads, tiles of rows, ..), of such an operand."""
            tensor = _narrowed(tensor, 1, heads)
            if entries < q.shape[0]:
                tensor = _narrowed(tensor, 0, chunk.sequences)
            if len(rows) == like.shape[1]:
                return tensor
            tiles = range(rows.start // ATOM_ROWS, -(-rows.stop // ATOM_ROWS))
            return _narrowed(tensor, 2, tiles)

        operands = []
        for number, tensor in enumerate(self.operands):
            is_of_queries = number % len(MXFP8_GRADIENT_OPERANDS) not in _OF_KEYS
            if tensor.ndim == SCALE_RANK:
                sides = (q, chunk.heads, chunk.queries), (k, chunk.heads_kv, chunk.keys)
                operands.append(scales_of(tensor, *sides[not is_of_queries]))
            else:
                operands.append((of_queries if is_of_queries else of_keys)(tensor))
        stats = _narrowed(self.stats, 1, chunk.heads)
        if entries < q.shape[0] or len(chunk.queries) < q.shape[1]:
            of_sequence = padded_rows(q.shape[1], 1, packed=False)
            begin = chunk.sequences.start * of_sequence + chunk.queries.start
            count = padded_rows(len(chunk.queries), entries, packed=False)
            stats = _narrowed(stats, 2, range(begin, begin + count))
        return GradientTensors(
            tuple(operands),
            stats,
            tuple(
                of_queries(tensor) if name == "dq" else of_keys(tensor)
                for name, tensor in zip(names, self.results, strict=True)
            ),
            self.optional,
            None if self.ds is None else begin_of(self.ds, chunk.problem.ds_shape),
        )


#: Places of k, v and k_t among `MXFP8_GRADIENT_OPERANDS`.
_OF_KEYS = tuple(i for i, name in enumerate(MXFP8_GRADIENT_OPERANDS) if name[0] in "kv")
#: Of the lists of a block mask, (1 or batch, 1 or heads, ...); no other ragged tensor has it.
TABLE_RANK = 5


def _narrowed(tensor: Any, dim: int, span: range, each: int = 1) -> Any:
    return tensor.narrow(dim, span.start * each, len(span) * each)


def begin_of(room: Any, shape: tuple[int, ...]) -> Any:
    """Return a contiguous tensor of this shape at the start of a one-dimensional one."""
    return room.narrow(0, 0, math.prod(shape)).view(shape)


def gradient_call_arguments(
    tensors: GradientTensors, problem: BackwardProblem, gpu: Gpu
) -> tuple[Any, ...]:
    forward = problem.forward
    names = *forward.ragged, *forward.function_tensors
    return (
        tuple(aligned_view(tensor, TMA_ALIGNMENT) for tensor in tensors.operands),
        aligned_view(tensors.stats, TMA_ALIGNMENT),
        tuple(aligned_view(tensor, SECTOR_BYTES) for tensor in tensors.results),
        None if tensors.ds is None else aligned_view(tensors.ds, TMA_ALIGNMENT),
        optional_values({name: tensors.optional[name] for name in names}),
        call_scalars(problem.dkdv_class, forward, gpu, problem),
        STREAM,
    )
