"""Softmax on two pipes: hardware exp2 mixed with a polynomial, and the online softmax around it.

Host side, without the DSL: `fit` (minimax coefficients), `pattern` (those the kernels use, and
which elements are emulated), `reference_twin` (the device's bits in numpy).  Device side: `exp2`
and `online`; they import the DSL, so they are not imported here.
"""

from .pattern import COEFFICIENTS, FRAGMENT_COLUMNS, HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern

__all__ = ["COEFFICIENTS", "FRAGMENT_COLUMNS", "HARDWARE_ONLY", "POLYNOMIAL_ONLY", "Ex2Pattern"]
