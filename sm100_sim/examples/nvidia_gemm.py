"""A GEMM of NVIDIA's CUTLASS operators; a GPU script of a B200.

    SM100_SIM_SANITIZE=1 python -m sm100_sim examples/nvidia_gemm.py [OPERATOR]

f16 operands of small integers, 256 x 256 x 192, where float64 has the exact result. OPERATOR is the
name of the operator's class: PersistentDenseGemmOperator (tiles by cluster launch control), or
TgvGemmOperator, of which docs/findings.md tells. Prints the largest error. Needs
nvidia-cutlass-operators (in the extra `test` of this project).
"""

from __future__ import annotations

import sys

import torch
from cutlass import operators

M, N, K = 256, 256, 192


def main(name: str) -> None:
    """Run the first operator of that class that takes the operands."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (rows, K), generator=generator).half() for rows in (M, N))
    out = torch.empty(M, N, dtype=torch.float16, device="cuda")
    arguments = operators.GemmArguments(
        A=a.cuda(), B=b.cuda().T, out=out, accumulator_type=torch.float32
    )
    found = operators.get_operators(
        arguments, metadata_filter=lambda metadata: metadata.operator_class.__name__ == name
    )
    if not found:
        sys.exit(f"no {name} takes these operands")
    found[0].run(arguments)
    torch.cuda.synchronize()
    print(f"max error {(out.cpu().double() - a.double() @ b.double().T).abs().max().item():.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["PersistentDenseGemmOperator"])
