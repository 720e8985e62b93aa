"""The forward: into how many parts the keys are divided, which kernels run, in which order.

Where keys are divided, each part of them has a result of its own, and `forward_combine` makes one
of these. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import environment
from ..call.checks import check_page_numbers, reads_contents
from ..call.descales import scale_operand
from ..call.forward_problem import ForwardCall, Problem
from ..call.function_tensors import function_operand
from ..call.last_turn import LastTurn, last_turn
from ..call.operator_arguments import OTHERS, ForwardTensors
from ..call.part_lists import marked
from ..call.splits import divided
from ..gpus.devices import Gpu
from ..kernels.part_list import HEADER, list_length
from ..kernels.sequences import PAGE_TABLE, PART_LIST
from .arguments import LARGEST_LENGTH
from .catalogue import combine_spec, forward_spec
from .compile import CompiledKernel, compile_kernel
from .forward_arguments import CallTensors, call_arguments, combine_call_arguments
from .kept_tensors import made_to_keep
from .launch import gpu_of, launch
from .new_tensors import maker
from .recording import Allocate, Make, Tensors, give_up, in_place, made_for, operand, table
from .tail import finish_packed, ready_to_finish

__all__ = ["combine", "empty_results", "get_ready", "launch_forward", "run_forward"]

#: CTAs of a grid, which kernels count in 32 bits.
LARGEST_GRID = (1 << 31) - 1

#: Role of the results of parts of the keys, O and then the LSE, and elements between these: what is
#: written behind O is an error in the simulator, and not an LSE.
PARTS, BETWEEN_PARTS = "parts", 256

#: Role of the greatest logits of the queries.
ROW_MAXIMA = "row_maxima"

#: Places of the sink, and of what is written to behind all others, among a call's tensors.
SINK, OUT = ForwardTensors._fields.index("sink"), len(ForwardTensors._fields)
_BETWEEN = (None,) * len(OTHERS)


def run_forward(
    call: ForwardCall,
    problem: Problem,
    num_splits: int,
    config: Any,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (out, lse) of a described call, with `max_logits` also (heads,) of these.

    num_splits: see `splits.divided`. config: None for the default one of the call and the GPU. out:
    4-D, where the first result is written; None for a new tensor.
    """
    if problem.is_empty:
        made, lse = empty_results(problem)
        # Without sequences all rows are behind the last offset.
        out, lse = (made if out is None else out).zero_(), lse.fill_(-math.inf)
        if problem.options.max_logits:
            return out, lse, lse.new_full(problem.q_shape[2:3], -math.inf)
        return out, lse
    gpu = gpu_of(problem.device)
    last = last_turn(problem, num_splits, gpu)
    if last is not None:
        _check_grid(problem)
        return _run_in_two(call, problem, last, gpu, config, out)
    problem = divided(problem, num_splits, gpu)
    _check_list(call, problem)
    _check_grid(problem)
    compiled = compile_kernel(forward_spec(problem, gpu, config))
    if reads_contents(problem.device) and problem.device.type != "cpu":
        give_up()  # contents are read again at every call
    elif PAGE_TABLE in call.ragged and environment.checks_pages():
        _check_pages(call, problem)
    ragged = tuple(call.ragged[name] for name in problem.tables)
    return launch_forward(compiled, problem, call.inputs, call.sink, ragged, out)


def get_ready(call: ForwardCall, problem: Problem, num_splits: int, config: Any) -> None:
    """Raise what `run_forward` would, and have its kernels: for those who write before they call
    it."""
    if problem.is_empty:
        return
    gpu = gpu_of(problem.device)
    last = last_turn(problem, num_splits, gpu)
    launched = last.problems(problem) if last else (divided(problem, num_splits, gpu),)
    _check_list(call, launched[0])
    _check_grid(problem if last else launched[0])
    for one in launched:
        compile_kernel(forward_spec(one, gpu, config))
    if launched[-1].num_splits > 1:
        compile_kernel(combine_spec(launched[-1]))
    ready_to_finish(problem)


def _run_in_two(
    call: ForwardCall,
    problem: Problem,
    last: LastTurn,
    gpu: Gpu,
    config: Any,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, the queries of the last turn behind the others and their keys divided."""
    first, rest = last.problems(problem)
    # All kernels are there before any is launched.
    compiled = [compile_kernel(forward_spec(one, gpu, config)) for one in (first, rest)]
    compile_kernel(combine_spec(rest))
    q, k, v = call.inputs
    q = operand(q)
    made, (out, lse) = _make((q, k, v), call.sink, out, problem, rest)
    before, behind = slice(last.queries), slice(last.queries, None)
    for one, kernel, rows in zip((first, rest), compiled, (before, behind), strict=True):
        results = out[:, rows], lse[..., rows]
        _launch(kernel, one, (q[:, rows], k, v), made, results)
    return out, lse


def _check_grid(problem: Problem) -> None:
    """Raise ValueError for more tiles than a grid can have. problem: divided."""
    ctas = problem.num_tiles * problem.num_splits * problem.tiles.cluster
    if ctas > LARGEST_GRID:
        raise ValueError(
            f"max_seqlen_q is {problem.max_seqlen_q}: {problem.sequences} sequences of as many "
            f"queries take {ctas} CTAs; accepted: up to {LARGEST_GRID}; as max_seqlen_q the "
            "longest sequence's, or a tensor, for the rows of q"
        )


def _check_list(call: ForwardCall, problem: Problem) -> None:
    """Raise ValueError for a list of parts that is none of this call's. problem: divided."""
    if not problem.lists_parts:
        return
    words = call.ragged[PART_LIST]
    length = list_length(problem.num_splits, problem.sequences)
    if words.numel() != length:
        raise ValueError(
            f"scheduler_metadata has {words.numel()} words; accepted here: {length}, as "
            "get_scheduler_metadata makes for the batch, the heads and the queries of this call"
        )
    made_for = marked(words)
    if made_for is None and reads_contents(words.device):
        made_for = tuple(words[1:HEADER].tolist())
    wanted = problem.num_splits, problem.sequences, problem.q_shape[2]
    if made_for is not None and made_for != wanted:
        given, accepted = (
            f"{sequences} sequences of {heads} query heads in up to {parts} parts"
            for parts, sequences, heads in (made_for, wanted)
        )
        raise ValueError(
            f"scheduler_metadata is a list for {given}; accepted: {accepted}, as "
            "get_scheduler_metadata makes for the batch, the heads and the queries of this call"
        )


def _check_pages(call: ForwardCall, problem: Problem) -> None:
    """Page numbers on a GPU, at every call: none is repeated without.

    Raises ValueError as `check_page_numbers` does, and RuntimeError while a graph is captured.
    """
    if problem.device.type == "cpu":
        return  # they were checked with all else
    give_up()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{environment.CHECK_PAGES.name} is set: page numbers are read on the host, which a "
            "CUDA graph cannot capture; accepted: capture without it"
        )
    check_page_numbers(call.q, call.k, call.ragged, problem.options.window)


def launch_forward(
    compiled: CompiledKernel,
    problem: Problem,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sink: torch.Tensor | None = None,
    ragged: tuple[torch.Tensor, ...] = (),
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a compiled kernel on 4-D q, k, v; return its results as `run_forward` does.

    ragged: those of `problem.tables`, in their order. out: new and contiguous, or the `out` given,
    with the shape and dtype of q; lse: (batch, heads_q, seqlen_q) float32, natural log.
    """
    made, results = _make(inputs, sink, out, problem, problem)
    _launch(compiled, problem, inputs, made, results, ragged)
    if problem.options.max_logits:
        return *results, _of_heads(made[ROW_MAXIMA])
    return results


def _make(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    problem: Problem,
    divided: Problem,
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(what is made for a call, by role; its results). divided: of the queries whose keys may be in
    parts, those of the problem or some of them."""
    if out is None:
        finish = _results_and_maxima if problem.options.max_logits else _results
        made = made_for((*inputs, sink), _allocation(problem, divided), finish)
        return made, (made["out"], made["lse"])
    given = (*inputs, sink, *_BETWEEN, out)
    made = made_for(given, _allocation(problem, divided, into=True), _written)
    return made, (operand(out), made["lse"])


def _launch(
    compiled: CompiledKernel,
    problem: Problem,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    made: dict[str, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    ragged: tuple[torch.Tensor, ...] = (),
) -> None:
    """Launch the forward, then the kernels that its results need: the combining one where keys are
    divided, the last one where queries are packed. made: by `_make`."""
    is_split = problem.num_splits > 1
    parts = _parts_in(problem, made[PARTS]) if is_split else results
    # All kernels are there before any is launched.
    if is_split:
        compile_kernel(combine_spec(problem))
    ready_to_finish(problem)
    q, k, v = map(operand, inputs)
    if k.shape[1] == 0:
        # No key at all: TMA cannot describe an empty tensor, and no row of this one is read.
        k = v = q.new_zeros((k.shape[0], 1, *k.shape[2:])).to(k.dtype)
        give_up()
    if problem.kv_dtype is not None:
        # Bytes in twos: CuTe DSL takes no tensor of single ones from PyTorch.
        k, v = k.view(problem.dtype), v.view(problem.dtype)
    tables = _operands_of_tables(problem, ragged)
    sink = () if not problem.sink else (made["sink_operand"],)
    tensors = CallTensors(q, k, v, *parts, sink + tables, made.get(ROW_MAXIMA))
    roles: tuple[str, ...] = (PARTS, PARTS) if is_split else ("out", "lse")
    if problem.options.max_logits:
        roles = (*roles, ROW_MAXIMA)
    launch(
        compiled,
        problem.device,
        lambda gpu, stream: call_arguments(tensors, problem, gpu, stream),
        ("q", "k", "v", *roles, *(("sink_operand",) if sink else ()), *problem.tables),
    )
    if is_split:
        combine(problem, parts, results, tables[: len(problem.ragged)])
    by_name = dict(zip(problem.tables, ragged))
    finish_packed(
        problem, [("out", "q", results[0])], results[1], by_name, (k.shape[1], LARGEST_LENGTH, 0)
    )


def _operands_of_tables(
    problem: Problem, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Tensors of `problem.tables` as kernels read them."""
    found = []
    for name, tensor in zip(problem.tables, given, strict=True):
        if name in problem.scales:
            tensor = in_place(tensor, scale_operand(tensor, problem.descale))
        elif name in problem.function_tensors:
            tensor = in_place(tensor, function_operand(tensor))
        elif tensor.ndim > 1:
            tensor = table(tensor)
        found.append(tensor)
    return tuple(found)


def _results(
    tensors: Tensors, made: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = made
    return out, lse


def _results_and_maxima(
    tensors: Tensors, made: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, *_, row_maxima = made
    return out, lse, _of_heads(row_maxima)


def _of_heads(row_maxima: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each head, (heads,), over (batch or parts, heads, queries)."""
    return row_maxima.amax((0, 2))


def _written(
    tensors: Tensors, made: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The same of a call that writes to a tensor of the user's."""
    return tensors[OUT], made[0]


def _allocation(problem: Problem, divided: Problem, into: bool = False) -> Allocate:
    """All that a forward makes beside its arguments, of which q is the first, the sink the
    fourth. divided: as `_make`'s. into: out is an argument, too."""
    roles: tuple[str, ...] = ("lse",) if into else ("out", "lse")
    if divided.num_splits > 1:
        roles = (*roles, PARTS)
    if problem.sink:
        roles = (*roles, "sink_operand")
    if problem.options.max_logits:
        roles = (*roles, ROW_MAXIMA)
    if into:
        return Allocate(roles, _all_of(divided, _lse_maker(problem)))
    unread = _unread(problem)
    make = _all_of(divided, _maker(problem))
    if unread is None:
        return Allocate(roles, make)
    new_out = maker(problem.q_shape, problem.dtype, problem.device)

    def out_alone(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return new_out(), unread

    return Allocate(roles, make, _all_of(divided, out_alone))


def _all_of(divided: Problem, results: Make) -> Make:
    """What makes the results and all else of a forward."""
    makers = [results]
    if divided.num_splits > 1:
        makers.append(_parts_maker(divided))
    if divided.sink:
        makers.append(_sink_operand)
    if divided.options.max_logits:
        makers.append(_row_maxima_maker(divided))
    if len(makers) == 1:
        return results
    return lambda tensors: tuple(made for make in makers for made in make(tensors))


def _row_maxima_maker(problem: Problem) -> Make:
    """Make the greatest logits of all queries, like the LSE that the forward writes.

    They begin with -inf: the kernel writes neither rows past the queries of a sequence nor parts
    without work.
    """
    is_split = problem.num_splits > 1
    shape = _shapes_of_parts(problem)[1] if is_split else problem.lse_shape
    new_maxima = maker(shape, torch.float32, problem.device)
    return lambda tensors: (new_maxima().fill_(-math.inf),)


def _sink_operand(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    sink = tensors[SINK]
    assert sink is not None
    return (sink.detach().float().contiguous(),)


def _unread(problem: Problem) -> torch.Tensor | None:
    """Where a call of this problem may write an LSE that nobody reads, in place of memory of its
    own; None where that is too small, or must not be made now.

    Kernels of any stream write to it at any time, and none reads it.
    """
    device = problem.device
    rows = math.prod(problem.lse_shape)
    if device.type != "cuda" or rows > UNREAD_ROWS or "seqused_q" in problem.ragged:
        return None
    if device.index not in _unread_rows:
        if torch.cuda.is_current_stream_capturing():
            return None
        _unread_rows[device.index] = made_to_keep(
            lambda: torch.empty(UNREAD_ROWS, dtype=torch.float32, device=device), device
        )
    return _unread_rows[device.index]


#: Rows of that memory, 1 MiB, and it by device.
UNREAD_ROWS = 1 << 18
_unread_rows: dict[int, torch.Tensor] = {}


def _lists(problem: Problem, ragged: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """What of the ragged tensors the kernel gets which combines listed parts, in its order."""
    if not problem.lists_parts:
        return {}
    given = dict(zip(problem.ragged, ragged))
    return {name: given[name] for name in (PART_LIST, "cu_seqlens_q") if name in given}


def combine(
    problem: Problem,
    parts: tuple[torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    ragged: tuple[torch.Tensor, ...] = (),
) -> None:
    """Fill results from the parts, each (out, lse), by `forward_combine`. ragged: tensors in the
    problem's order, which those of listed parts are among."""
    lists = _lists(problem, ragged)
    tensors = tuple(lists.values())
    launch(
        compile_kernel(combine_spec(problem)),
        problem.device,
        lambda gpu, stream: combine_call_arguments(parts, results, stream, tensors),
        (PARTS, PARTS, "out", "lse", *lists),
    )


def empty_results(problem: Problem, parts: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Results to write to; NaN on the CPU, so that an element never written shows.

    Rows past seqused_q are not written: they are 0 with an LSE of -inf. parts: those of the parts
    of the keys, float32, one after the other for each batch entry; the combining kernel then writes
    every row of the results proper, and reads no O of a part with an LSE of -inf.
    """
    if parts:
        (made,) = _parts_maker(problem)(())
        return _parts_in(problem, made)
    out, lse = _maker(problem)(())
    return out, lse


def _maker(problem: Problem) -> Make:
    """`empty_results` of a problem, for any number of calls, whatever their tensors."""
    new_out = maker(problem.q_shape, problem.dtype, problem.device)
    new_lse = maker(problem.lse_shape, torch.float32, problem.device)
    fill = _filler(problem, False)

    def make(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = new_out(), new_lse()
        if fill is not None:
            fill(out, lse)
        return out, lse

    return make


def _parts_maker(problem: Problem) -> Make:
    """The same of the parts of the keys, both in one allocation: see `_parts_in`."""
    of_out, of_lse = map(math.prod, _shapes_of_parts(problem))
    new_parts = maker((of_out + BETWEEN_PARTS + of_lse,), torch.float32, problem.device)
    fill = _filler(problem, True)

    def make(tensors: Tensors) -> tuple[torch.Tensor]:
        parts = new_parts()
        if fill is not None:
            fill(*_parts_in(problem, parts))
        return (parts,)

    return make


def _shapes_of_parts(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of O and of the LSE."""
    (batch, *rows), (_, *lse_rows) = problem.q_shape, problem.lse_shape
    entries = batch * problem.num_splits
    if problem.lists_parts:
        _, heads, columns = rows
        entries, longest = problem.num_splits, problem.max_seqlen_q
        rows, lse_rows = [longest, heads, columns], [heads, longest]
    return (entries, *rows), (entries, *lse_rows)


def _parts_in(problem: Problem, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the parts of the keys in what was allocated for both."""
    out_shape, lse_shape = _shapes_of_parts(problem)
    sizes = [math.prod(out_shape), BETWEEN_PARTS, math.prod(lse_shape)]
    out, _, lse = parts.split(sizes)
    return out.view(out_shape), lse.view(lse_shape)


def _lse_maker(problem: Problem) -> Make:
    """Makes the LSE of a call that writes to a tensor of the user's, which it fills like a new
    one."""
    new_lse = maker(problem.lse_shape, torch.float32, problem.device)
    fill = _filler(problem, False)

    def make(tensors: Tensors) -> tuple[torch.Tensor]:
        lse = new_lse()
        out = tensors[OUT]
        if fill is not None and out is not None:
            fill(out, lse)
        return (lse,)

    return make


def _filler(
    problem: Problem, parts: bool
) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """What fills (out, lse) before a launch, in place; None where nothing does."""
    device, is_split = problem.device, problem.num_splits > 1
    is_clipped = "seqused_q" in problem.ragged and parts == is_split
    if device.type != "cpu" and not is_clipped:
        return None

    def fill(out: torch.Tensor, lse: torch.Tensor) -> None:
        if device.type == "cpu":
            out.fill_(math.nan)
            lse.fill_(math.nan)
        if is_clipped:
            lse.fill_(-math.inf)
            if not is_split:
                out.zero_()

    return fill
