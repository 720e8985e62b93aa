"""Coefficients c0, c1, ... of the polynomials for 2^f on [0, 1] that the kernels use.

Relative minimax with c0 = 1, each a float32, as `python -m fa4_hd256.softmax_emu fit --degree N`
finds them; written as exact hexadecimal floats.  Largest relative errors of the float32 evaluation:
2.054e-3, 8.565e-5, 2.955e-6, 1.415e-7 for degrees 2 to 5.
"""

_HEXADECIMAL = {
    2: ("0x1p+0", "0x1.54f8d6p-1", "0x1.51d9ccp-2"),
    3: ("0x1p+0", "0x1.63e658p-1", "0x1.d2378cp-3", "0x1.3baaaep-4"),
    4: ("0x1p+0", "0x1.62d6c6p-1", "0x1.ee2450p-3", "0x1.abf868p-5", "0x1.b7f734p-7"),
    5: (
        "0x1p+0",
        "0x1.62e4bap-1",
        "0x1.ebdb58p-3",
        "0x1.c91cfep-5",
        "0x1.2777d0p-7",
        "0x1.e976aep-10",
    ),
}

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    degree: tuple(float.fromhex(text) for text in texts) for degree, texts in _HEXADECIMAL.items()
}
