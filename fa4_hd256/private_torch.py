"""PyTorch's private API: all that the package uses of `torch._C`, under names of its own.

Nothing else of the package names `torch._C`, so that this file says what a release of PyTorch may
break. Functions that calls ask each time are bound once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Numbers of modes that are active: of dispatch, and of functions.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack

#: The innermost transform of torch.func, all of them, and their kinds; None where there is none.
transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
transforms: Callable[[], Any] = torch._C._functorch.get_interpreter_stack
TransformType: Any = torch._C._functorch.TransformType

#: What torch.jit.trace records; None where nothing is traced.
tracer: Callable[[], Any] = torch._C._get_tracing_state

#: Return True for a stand-in of torch.func, and for a batch of is_grads_batched=True.
is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batch_of_gradients: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor

#: Return True if autocast is on for some type of devices, and while a profiler runs.
is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled

#: Return True if autograd keeps the graph that it now goes through.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: The current GPU, and its current stream, as numbers; not in a PyTorch without CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)

DispatchKey = torch._C.DispatchKey


def excluding(key: DispatchKey) -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def nesting_of_batches() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return PyTorch's guard of compiled code: (tensors) -> whether they have the classes, dispatch
    keys, dtypes, devices, sizes, strides and requires_grad of these. None where this PyTorch has
    no such guard."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if guard.check(*tensors) and not guard.check(*[t.unsqueeze(0) for t in tensors]):
            return guard.check
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return None
