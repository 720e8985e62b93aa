"""New rows of a cache of keys and values: the kernel that writes them, and turns queries."""

from __future__ import annotations

import torch

from ..call.descales import scale_operand
from ..gpus.family import architecture_of
from ..kernels.problem_class import DESCALES, KV_DTYPES, AppendClass
from .append_arguments import AFTER, ROTATED, AppendOptions, AppendTensors, append_call_arguments
from .catalogue import append_spec
from .compile import CompiledKernel, compile_kernel
from .launch import launch
from .new_tensors import maker
from .recording import Allocate, Tensors, in_place, made_for, operand, table

__all__ = ["ready_to_append", "run_append"]


def ready_to_append(tensors: AppendTensors, options: AppendOptions) -> CompiledKernel:
    """The kernel of a call, compiled."""
    architecture = architecture_of(tensors.k.device)
    return compile_kernel(append_spec(tensors.compiled_in(options), architecture))


def run_append(tensors: AppendTensors, options: AppendOptions) -> tuple[torch.Tensor, ...]:
    """Write the new rows. Returns (batch,) int32, the rows in use with them, and with rotary
    embedding the queries, turned, as a contiguous tensor."""
    lengths, q = tensors.lengths, tensors.q
    is_rotary = tensors.rotary_cos is not None
    if not lengths.numel() or not tensors.k.numel() and not (is_rotary and q.numel()):
        return (lengths.clone(), q.clone()) if is_rotary else (lengths.clone(),)
    compiled = ready_to_append(tensors, options)
    # No rows are in use where nobody has counted them, as on the CPU without the simulator.
    on_cpu = lengths.device.type == "cpu"
    makers = {AFTER: maker(lengths.shape, torch.int32, lengths.device, is_zero=on_cpu)}
    if is_rotary:
        makers[ROTATED] = maker(q.shape, q.dtype, q.device)
    make = tuple(makers.values())
    allocate = Allocate(tuple(makers), lambda given: tuple([new() for new in make]))
    made = made_for(tensors, allocate, _results)
    operands = _operands(tensors, made, tensors.compiled_in(options))
    roles = [role for role, tensor in operands.items() if tensor is not None]
    if tensors.rotary_seqlens is None:
        roles = ["lengths" if role == "rotary_seqlens" else role for role in roles]
    launch(
        compiled, lengths.device, lambda gpu, stream: append_call_arguments(operands, stream), roles
    )
    return tuple(made.values())


def _results(tensors: Tensors, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made


def _operands(
    tensors: AppendTensors, made: dict[str, torch.Tensor], own: AppendClass
) -> dict[str, torch.Tensor | None]:
    """Tensors as the kernel reads them, by role, in its order; None for what it does not take."""
    found: dict[str, torch.Tensor | None] = {}
    for name in ("k_cache", "v_cache", "k", "v"):
        tensor = getattr(tensors, name)
        if own.packed and name in ("k", "v"):
            tensor = tensor.unsqueeze(0)
        tensor = operand(tensor)
        # CuTe DSL takes no tensor of single bytes from PyTorch.
        found[name] = tensor.view(own.torch_type) if tensor.dtype in KV_DTYPES else tensor
    lengths = in_place(tensors.lengths, tensors.lengths.contiguous())
    found["lengths"] = lengths
    found[AFTER] = made[AFTER]
    found["cu_seqlens_k_new"] = tensors.cu_seqlens_k_new
    found["page_table"] = table(tensors.page_table) if own.paged else None
    for name in DESCALES:
        scale = getattr(tensors, name)
        found[name] = in_place(scale, scale_operand(scale, own.descale)) if own.descale else None
    return found | _rotary_operands(tensors, made, own, lengths)


def _rotary_operands(
    tensors: AppendTensors, made: dict[str, torch.Tensor], own: AppendClass, lengths: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Those of rotary embedding, likewise. lengths: positions where the user gives none."""
    if own.rotary is None:
        return dict.fromkeys(
            ("rotary_cos", "rotary_sin", "rotary_seqlens", "q", ROTATED, "cu_seqlens_q")
        )
    found: dict[str, torch.Tensor | None] = {}
    for name in ("rotary_cos", "rotary_sin"):
        given = getattr(tensors, name)
        found[name] = table(given if given.stride(1) == 1 else in_place(given, given.contiguous()))
    begins = tensors.rotary_seqlens
    found["rotary_seqlens"] = lengths if begins is None else in_place(begins, begins.contiguous())
    q, rotated = tensors.q, made[ROTATED]
    if own.rotary.packed:
        q, rotated = q.unsqueeze(0), rotated.unsqueeze(0)
    found["q"], found[ROTATED] = operand(q), operand(rotated)
    found["cu_seqlens_q"] = tensors.cu_seqlens_q
    return found
