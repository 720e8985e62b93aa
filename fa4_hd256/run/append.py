"""New rows of a cache of keys and values: the kernel that writes them."""

from __future__ import annotations

import torch

from fa4_hd256.call.descales import scale_operand
from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.kernels.problem_class import DESCALES, KV_DTYPES, AppendClass

from .append_arguments import AFTER, AppendTensors, append_call_arguments
from .catalogue import append_spec
from .compile import CompiledKernel, compile_kernel
from .launch import launch
from .new_tensors import maker
from .recording import Allocate, Tensors, in_place, made_for, operand, table

__all__ = ["ready_to_append", "run_append"]


def ready_to_append(tensors: AppendTensors, descale: str) -> CompiledKernel:
    """The kernel of a call, compiled. descale: as of `AppendTensors.compiled_in`."""
    architecture = architecture_of(tensors.k.device)
    return compile_kernel(append_spec(tensors.compiled_in(descale), architecture))


def run_append(tensors: AppendTensors, descale: str) -> torch.Tensor:
    """Write the new rows; (batch,) int32, the rows in use with them. descale: as of
    `AppendTensors.compiled_in`."""
    lengths = tensors.lengths
    if not tensors.k.numel() or not lengths.numel():
        return lengths.clone()
    compiled = ready_to_append(tensors, descale)
    # No rows are in use where nobody has counted them, as on the CPU without the simulator.
    on_cpu = lengths.device.type == "cpu"
    new_after = maker(lengths.shape, torch.int32, lengths.device, is_zero=on_cpu)
    allocate = Allocate((AFTER,), lambda given: (new_after(),))
    after = made_for(tensors, allocate, _results)[AFTER]
    operands = _operands(tensors, after, tensors.compiled_in(descale))
    roles = [role for role, tensor in operands.items() if tensor is not None]
    launch(
        compiled, lengths.device, lambda gpu, stream: append_call_arguments(operands, stream), roles
    )
    return after


def _results(tensors: Tensors, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made


def _operands(
    tensors: AppendTensors, after: torch.Tensor, own: AppendClass
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
    found["lengths"] = in_place(tensors.lengths, tensors.lengths.contiguous())
    found[AFTER] = after
    found["cu_seqlens_k_new"] = tensors.cu_seqlens_k_new
    found["page_table"] = table(tensors.page_table) if own.paged else None
    for name in DESCALES:
        scale = getattr(tensors, name)
        found[name] = in_place(scale, scale_operand(scale, own.descale)) if own.descale else None
    return found
