"""Choice of the score elements that take the polynomial instead of the hardware exp2, and the
polynomials' coefficients.

A thread's row of scores is worked on in fragments of 32 columns, in pairs of columns (the packed
f32x2 instructions take two).  Names and rule are the field's: the pair at even column k of an
eligible fragment takes the hardware path iff `k % ex2_emu_freq < ex2_emu_freq - ex2_emu_res`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

FRAGMENT_COLUMNS = 32

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

#: Coefficients c0, c1, ... of the polynomials for 2^f on [0, 1] that the kernels use, by degree.
#: Relative minimax with c0 = 1, each a float32, as `python -m fa4_hd256.softmax_emu fit --degree N`
#: finds them; written as exact hexadecimal floats.  Largest relative errors of the float32
#: evaluation: 2.054e-3, 8.565e-5, 2.955e-6, 1.415e-7 for degrees 2 to 5.
COEFFICIENTS: dict[int, tuple[float, ...]] = {
    degree: tuple(float.fromhex(text) for text in texts) for degree, texts in _HEXADECIMAL.items()
}


@dataclass(frozen=True)
class Ex2Pattern:
    """The static mix of hardware and polynomial exp2; part of a kernel's compile key.

    ex2_emu_freq: period of the rule in columns, even, up to 32; 0 means hardware only.
    ex2_emu_res: columns of each period that take the polynomial, 0 to ex2_emu_freq.
    ex2_emu_start_frg: fragments before this one are hardware only.
    last_fragment_hardware: whether the last fragment of a row is hardware only.
    degree: degree of the polynomial, 2 to 5.

    The share that these numbers suggest (res / freq) is not what is compiled, since only even
    columns are tested and whole fragments are exempt: `true_share` counts the elements.

    Raises TypeError or ValueError for a field outside its range.
    """

    ex2_emu_freq: int = 0
    ex2_emu_res: int = 0
    ex2_emu_start_frg: int = 0
    last_fragment_hardware: bool = True
    degree: int = 3

    def __post_init__(self) -> None:
        for name in ("ex2_emu_freq", "ex2_emu_res", "ex2_emu_start_frg", "degree"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                kind = type(value).__name__
                raise TypeError(f"{name} must be an int, got a value of type {kind}")
        if not isinstance(self.last_fragment_hardware, bool):
            kind = type(self.last_fragment_hardware).__name__
            raise TypeError(f"last_fragment_hardware must be a bool, got a value of type {kind}")
        freq, res = self.ex2_emu_freq, self.ex2_emu_res
        if freq < 0 or freq % 2 or freq > FRAGMENT_COLUMNS:
            raise ValueError(
                f"ex2_emu_freq is {freq}; accepted are 0 (hardware only) and the even numbers "
                f"from 2 to {FRAGMENT_COLUMNS}: columns are worked on in pairs"
            )
        if not 0 <= res <= freq:
            raise ValueError(
                f"ex2_emu_res is {res}; accepted are 0 to ex2_emu_freq, which is {freq}"
            )
        if self.ex2_emu_start_frg < 0:
            raise ValueError(
                f"ex2_emu_start_frg is {self.ex2_emu_start_frg}; accepted are fragment numbers "
                "from 0 on"
            )
        if self.degree not in COEFFICIENTS:
            raise ValueError(
                f"degree is {self.degree}; accepted are {', '.join(map(str, COEFFICIENTS))}"
            )

    def is_emulated(self, fragment: int, column: int, num_fragments: int) -> bool:
        """Return True if `column` (0..31) of `fragment` (0..num_fragments-1) takes the
        polynomial."""
        if not 0 <= fragment < num_fragments:
            raise ValueError(f"fragment {fragment} is not one of {num_fragments}")
        if not 0 <= column < FRAGMENT_COLUMNS:
            raise ValueError(f"column {column} is not in 0..{FRAGMENT_COLUMNS - 1}")
        if self.ex2_emu_freq == 0 or fragment < self.ex2_emu_start_frg:
            return False
        if self.last_fragment_hardware and fragment == num_fragments - 1:
            return False
        pair = column - column % 2
        return pair % self.ex2_emu_freq >= self.ex2_emu_freq - self.ex2_emu_res

    def emulated_count(self, num_columns: int) -> int:
        """Emulated elements in a row of `num_columns`, a positive multiple of 32."""
        if num_columns <= 0 or num_columns % FRAGMENT_COLUMNS:
            raise ValueError(
                f"num_columns is {num_columns}; accepted are positive multiples of "
                f"{FRAGMENT_COLUMNS}"
            )
        fragments = num_columns // FRAGMENT_COLUMNS
        return sum(
            self.is_emulated(fragment, column, fragments)
            for fragment in range(fragments)
            for column in range(FRAGMENT_COLUMNS)
        )

    def true_share(self, num_columns: int = 128) -> Fraction:
        """The share of elements that take the polynomial, exact; `float()` of it to print."""
        return Fraction(self.emulated_count(num_columns), num_columns)

    def __str__(self) -> str:
        share = 100 * float(self.true_share())
        if share == 0:
            return "exp2: hardware only (0 % emulated)"
        last = "last fragment on hardware" if self.last_fragment_hardware else "all fragments"
        return (
            f"exp2: {share:g} % emulated of 128 columns (freq {self.ex2_emu_freq}, "
            f"res {self.ex2_emu_res}, start fragment {self.ex2_emu_start_frg}, {last}, "
            f"degree {self.degree})"
        )


HARDWARE_ONLY = Ex2Pattern()
POLYNOMIAL_ONLY = Ex2Pattern(2, 2, 0, last_fragment_hardware=False)
