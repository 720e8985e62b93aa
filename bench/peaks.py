"""Peak rates of GPUs; measured rates are given as a share of them."""

from __future__ import annotations

#: Dense bf16 FLOP of an SM and clock, by compute capability: 4096 fused multiply-adds on SM100
#: (148 SMs at 1.86 GHz give the 2250 TFLOPS of the data sheet), half of that on SM90.
FLOP_PER_CLOCK = {(9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
SM100_FLOP_PER_CLOCK = FLOP_PER_CLOCK[10, 0]
