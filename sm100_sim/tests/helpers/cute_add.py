"""An addition of 32 numbers in CuTe DSL: kernel and host function. As a script it adds its argument
twice.
"""

import sys

import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack


def functions(language, on_stream=False, **launch):
    """Return the host function as a compiler takes it: `cutlass.cute`, or its experimental twin.

    on_stream: it has a stream as its last argument. launch: options of the launch beside the grid
    and the block.
    """

    @language.kernel
    def add_kernel(a: cute.Tensor, b: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        b[thread] = a[thread] + b[thread]

    @language.jit
    def add(a: cute.Tensor, b: cute.Tensor):
        add_kernel(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1), **launch)

    @language.jit
    def add_on(a: cute.Tensor, b: cute.Tensor, stream: CUstream):
        add_kernel(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    return add_on if on_stream else add


if __name__ == "__main__":
    assert torch.cuda.is_available()
    a = torch.full((32,), int(sys.argv[1]), device="cuda", dtype=torch.int32)
    b = torch.ones(32, device="cuda", dtype=torch.int32)
    compiled = cute.compile(functions(cute), from_dlpack(a), from_dlpack(b))
    for _ in range(2):
        compiled(from_dlpack(a), from_dlpack(b))
    torch.cuda.synchronize()
    print("sum", b.sum().item())
