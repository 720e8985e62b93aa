"""quack's row kernels on rows that do not fill a thread block; a GPU script of a B200.

    SM100_SIM_SANITIZE=1 python -m sm100_sim examples/quack_rows.py

rmsnorm, layernorm, softmax and cross-entropy, forward, bf16. Needs quack-kernels (the extra `test`
of this package). Prints the errors against float64.
"""

from __future__ import annotations

import torch
from quack.cross_entropy import cross_entropy
from quack.rmsnorm import layernorm_fwd, rmsnorm
from quack.softmax import softmax

ROWS, COLUMNS, EPSILON = 6, 1000, 1e-6


def normalised(x: torch.Tensor, centred: bool) -> torch.Tensor:
    """Rows over the root of their mean square, after their mean is taken away if centred."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def main() -> None:
    """Run the four kernels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
    labels = torch.arange(ROWS)
    exact, ones = x.double(), torch.ones(COLUMNS)
    given, weight = x.cuda(), ones.cuda()
    for name, found, true in (
        ("rmsnorm", rmsnorm(given, weight, eps=EPSILON), normalised(exact, False)),
        ("layernorm", layernorm_fwd(given, weight, eps=EPSILON), normalised(exact, True)),
        ("softmax", softmax(given), torch.softmax(exact, -1)),
        ("cross-entropy", cross_entropy(given, labels.cuda(), reduction="none"),
         torch.nn.functional.cross_entropy(exact, labels, reduction="none")),
    ):  # fmt: skip
        print(f"{name}: max error {(found.cpu().double() - true).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
