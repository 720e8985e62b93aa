"""CPU tensors as CuTe DSL and tvm-ffi require them: in CUDA memory, by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

#: Offset of DLDevice in DLManagedTensor: DLTensor comes first and starts with its data pointer.
_DEVICE_OFFSET = 8
_DL_CUDA = 2


class CudaCapsule:
    """A DLPack exporter that says a CPU tensor lies in CUDA memory.

    CuTe DSL gives CUDA tensors global-memory pointers; global memory is host memory here.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        import torch

        capsule = torch._C._to_dlpack(self._tensor.detach())
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        device = get(capsule, b"dltensor") + _DEVICE_OFFSET
        ctypes.c_int32.from_address(device).value = _DL_CUDA
        ctypes.c_int32.from_address(device + 4).value = 0
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, 0
