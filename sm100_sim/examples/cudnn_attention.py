"""cuDNN's attention for sm_100, forward and backward, in CuTe DSL; a GPU script of a B200.

    SM100_SIM_SANITIZE=1 python -m sm100_sim examples/cudnn_attention.py 128|256

Full attention, bf16, batch 1, heads 2/1, 256 queries and keys. Needs nvidia-cudnn-frontend (the
extra `published` of this package). Prints the errors against float64 beside PyTorch's in bf16.
"""

from __future__ import annotations

import math
import sys

import torch
from attention import inputs, report
from cudnn.sdpa.bwd.api_dsl_sm100_d128 import SdpaBwdDslSm100D128
from cudnn.sdpa.bwd.api_dsl_sm100_d256 import SdpaBwdDslSm100D256
from cudnn.sdpa.fwd import sdpa_fwd_wrapper_dsl_sm100

BACKWARD = {128: SdpaBwdDslSm100D128, 256: SdpaBwdDslSm100D256}


def main(head_dim: int) -> None:
    """Forward, then backward on what it returns; cuDNN has the heads before the rows."""
    tensors = inputs(head_dim)
    q, k, v, gradient = (t.cuda().transpose(1, 2) for t in tensors)
    scale = 1 / math.sqrt(head_dim)
    forward = sdpa_fwd_wrapper_dsl_sm100(q, k, v, scale_softmax=scale)
    found = dict.fromkeys(("out", "dq", "dk", "dv"), forward["o_tensor"])
    found |= {f"d{name}": torch.empty_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
    stats = forward["lse_tensor"].unsqueeze(-1)
    operands = (q, k, v, found["out"], gradient, stats, found["dq"], found["dk"], found["dv"])
    backward = BACKWARD[head_dim](*operands, scale_softmax=scale)
    backward.check_support()
    backward.compile()
    workspace = torch.empty(backward.scratch_workspace_bytes(), dtype=torch.uint8, device="cuda")
    backward.execute(*operands, scale_softmax=scale, workspace=workspace)
    report({name: t.transpose(1, 2).cpu() for name, t in found.items()}, tensors)


if __name__ == "__main__":
    main(int(sys.argv[1]))
