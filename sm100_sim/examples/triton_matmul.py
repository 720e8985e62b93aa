"""A matrix product in Triton, by TMA and tcgen05.mma; a GPU script of a B200.

    sm100-sim --sanitize examples/triton_matmul.py

docs/findings.md tells what is found in what Triton makes of it. Needs triton and
PyTorch (the simulator's extras `triton` and `attach`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def product(a, b, c, K, M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Compute one tile of C = A B."""
    m, n = tl.program_id(0) * M_TILE, tl.program_id(1) * N_TILE
    total = tl.zeros((M_TILE, N_TILE), tl.float32)
    for k in range(0, K, K_TILE):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total)


def main() -> None:
    """Multiply, and compare with PyTorch."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 128).half().cuda(), torch.randn(128, 256).half().cuda()
    c = torch.empty(256, 256, device="cuda")
    tiles = (a, [128, 64]), (b, [64, 128]), (c, [128, 128])
    operands = [TensorDescriptor.from_tensor(tensor, tile) for tensor, tile in tiles]
    product[(2, 2)](*operands, 128, M_TILE=128, N_TILE=128, K_TILE=64)
    error = (c.cpu() - a.cpu().float() @ b.cpu().float()).abs().max().item()
    print(f"{'PASS' if error < 1e-3 else 'FAIL'}: max error {error:.1e}")


if __name__ == "__main__":
    main()
