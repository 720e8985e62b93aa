"""Opcode counts in the PTX of the compiled softmax."""

import cutlass
import pytest
import torch
from cross_compile import compile_sm100, opcode_counts
from cutlass import Float32
from cutlass.cute.runtime import from_dlpack
from softmax_kernels import COLUMNS, ROWS, online_softmax

from fa4_hd256.softmax_emu import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern


def _counts(pattern, loop="for", dtype=cutlass.BFloat16, threshold=8.0):
    def tensor(columns, kind=torch.float32):
        return from_dlpack(torch.zeros(ROWS, columns, dtype=kind)).mark_layout_dynamic()

    wide, words, tiles = tensor(COLUMNS), tensor(COLUMNS // 2, torch.int32), tensor(1)
    row = from_dlpack(torch.zeros(ROWS))
    return opcode_counts(
        compile_sm100(
            online_softmax,
            (wide, words, wide, tiles, tiles),
            (row, row),
            Float32(1.0),
            (pattern, threshold, dtype, loop),
        )
    )


@pytest.mark.parametrize(
    "pattern",
    [
        HARDWARE_ONLY,
        POLYNOMIAL_ONLY,
        Ex2Pattern(4, 3),
        Ex2Pattern(16, 4, 1, degree=5),
    ],
    ids=str,
)
def test_opcodes_follow_the_pattern(pattern):
    counts = _counts(pattern)
    emulated = pattern.emulated_count(COLUMNS)
    assert counts["ex2.approx.ftz.f32"] == COLUMNS - emulated
    assert counts["ex2.approx.f32"] == 1, "the row factor has an opcode of its own"
    # One folded scale per pair, and one fma per degree and emulated pair.
    assert counts["fma.rn.f32x2"] == COLUMNS // 2 + pattern.degree * emulated // 2
    assert counts["add.rm.f32x2"] == emulated // 2
    assert counts["cvt.rn.bf16x2.f32"] == COLUMNS // 2
    # 63 additions join 64 pairs, one takes the old sum in.
    assert counts["add.rn.f32x2"] + counts["add.f32x2"] == 64
    # Three-input maxima take two columns each.
    clamps = emulated
    assert counts["max.f32"] - clamps <= COLUMNS // 2 + 4


def test_dynamic_loops_carry_the_state():
    pattern = Ex2Pattern(4, 3)
    assert _counts(pattern, "while")["ex2.approx.ftz.f32"] == 80
    assert _counts(pattern, "for", cutlass.Float16)["cvt.rn.f16x2.f32"] == COLUMNS // 2


@pytest.mark.parametrize(
    ("dtype", "threshold", "message"),
    [
        (cutlass.Float32, 8.0, "P must be BFloat16, Float16 or Float8"),
        (cutlass.Float16, 16.0, "rescale_threshold is 16.0"),
        (cutlass.BFloat16, -1.0, "rescale_threshold is -1.0"),
    ],
)
def test_unusable_settings_are_refused(dtype, threshold, message):
    with pytest.raises(Exception, match=message):
        _counts(HARDWARE_ONLY, dtype=dtype, threshold=threshold)
