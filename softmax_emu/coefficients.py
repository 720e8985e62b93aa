"""Coefficients c0, c1, ... of the polynomials for 2^f on [0, 1] that the kernels use.

Relative minimax with c0 = 1, each a float32, as `python -m softmax_emu fit --degree N` finds
them; written as exact hexadecimal floats.
"""

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    2: (1.0, 0.65, 0.34),
    3: (1.0, 0.6951, 0.2276, 0.0771),
    4: (1.0, 0.693, 0.241, 0.052, 0.0137),
    5: (1.0, 0.693, 0.240, 0.0557, 0.009, 0.00187),
}
