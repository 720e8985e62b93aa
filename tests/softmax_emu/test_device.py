"""The compiled device code in the simulator: bit-exact polynomial, exact online softmax."""

import functools
import math

import cutlass
import numpy as np
import pytest
import torch
from cross_compile import compile_for, compile_sm100, opcode_counts
from cutlass import Float32
from cutlass.cute.runtime import from_dlpack
from softmax_kernels import COLUMNS, ROWS, capped, online_softmax, polynomial

import sm100_sim
from fa4_hd256.softmax_emu import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern
from fa4_hd256.softmax_emu.online import LOWEST_MAXIMUM
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS
from fa4_hd256.softmax_emu.reference_twin import exp2_polynomial, exponentiate

pytestmark = pytest.mark.simulator

BFLOAT16, FLOAT16 = cutlass.BFloat16, cutlass.Float16
TORCH = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
MIXED = Ex2Pattern(4, 3)
# The polynomial's own error (8.57e-5 at degree 3), plus float32 sums and the approximate
# ex2, lg2 and rcp instructions.
TOLERANCE = 1.2e-4


def _arguments_of_exp2() -> np.ndarray:
    """Every kind of argument: special, whole, next to whole, subnormal results, random."""
    whole = np.arange(-130, 128, dtype=np.float32)
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            np.array([-np.inf, np.nan, -3.4e38, -0.0, 0.0, 1e-45, -1e-45, -1e-10], np.float32),
            whole,
            np.nextafter(whole, np.float32(np.inf)),
            np.nextafter(whole, np.float32(-np.inf)),
            rng.uniform(-128, 128, 3000).astype(np.float32),
            rng.uniform(-1, 1, 1000).astype(np.float32),
            (-np.exp(rng.uniform(-40, 5, 1002))).astype(np.float32),
        ]
    )


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_polynomial_is_bit_exact_with_the_twin(degree):
    x = _arguments_of_exp2()
    x_in, y_out = torch.from_numpy(x), torch.full((len(x),), math.nan)
    arguments = from_dlpack(x_in), from_dlpack(y_out)
    sm100_sim.launch(compile_sm100(polynomial, *arguments, degree), *arguments)
    result, expected = y_out.numpy(), exp2_polynomial(x, degree)
    different = result.view(np.uint32) != expected.view(np.uint32)
    assert not different.any(), (x[different][:5], result[different][:5], expected[different][:5])


def _scores(num_tiles: int) -> np.ndarray:
    """Rows that stay, creep, leap and fall; masked elements, tiles and whole rows."""
    rng = np.random.default_rng(num_tiles)
    scores = rng.normal(size=(ROWS, COLUMNS * num_tiles)).astype(np.float32) * 3
    tile = np.arange(COLUMNS * num_tiles) // COLUMNS
    scores[16:32] += 2 * tile  # creeps: below the threshold for a few tiles
    scores[32:48] += 60 * tile  # leaps in every tile
    scores[48:64] -= 60 * tile
    scores[64:72] -= 1000  # a maximum far from 0
    scores[72:80] += 1000
    scores[80:96, 1::3] = -np.inf
    scores[96:100, :COLUMNS] = -np.inf  # nothing visible in the first tile
    scores[100:104, :COLUMNS] = -np.inf
    scores[100:104] -= 1000  # its first maximum is far below 0
    scores[104:108, COLUMNS:] = -np.inf
    scores[108:112] = -np.inf  # nothing visible at all
    scores[112:116, 1:] = -np.inf  # one key
    return scores


@functools.cache
def _compiled(settings, num_tiles):
    tensors = [from_dlpack(torch.zeros(shape, dtype=dtype)) for shape, dtype in _shapes(num_tiles)]
    return compile_sm100(
        online_softmax, tuple(tensors[:5]), tuple(tensors[5:]), Float32(1), settings
    )


def _shapes(num_tiles):
    columns = COLUMNS * num_tiles
    wide, tiles = ((ROWS, columns), torch.float32), ((ROWS, num_tiles), torch.float32)
    row = ((ROWS,), torch.float32)
    return wide, ((ROWS, columns // 2), torch.int32), wide, tiles, tiles, row, row


def _run(scores, scale_log2, settings):
    """Return (packed P as the dtype, p, factors, maxima, inverse, LSE) and the launch's report."""
    num_tiles = scores.shape[1] // COLUMNS
    buffers = [torch.zeros(shape, dtype=dtype) for shape, dtype in _shapes(num_tiles)]
    buffers[0] = torch.from_numpy(scores.copy())
    tensors = [from_dlpack(buffer) for buffer in buffers]
    compiled = _compiled(settings, num_tiles)
    report = sm100_sim.launch(compiled, tuple(tensors[:5]), tuple(tensors[5:]), Float32(scale_log2))
    buffers[1] = buffers[1].view(TORCH[settings[2]]).float()
    return [buffer.numpy() for buffer in buffers[1:]], report


def _expected_maxima(scores, scale, threshold):
    """The lagging maxima of every tile, (rows, tiles), in float32 as the device computes."""
    row_max = np.full(ROWS, LOWEST_MAXIMUM, np.float32)
    maxima = []
    for tile in range(scores.shape[1] // COLUMNS):
        new = np.maximum(row_max, scores[:, tile * COLUMNS : (tile + 1) * COLUMNS].max(axis=1))
        keep = (new - row_max) * np.float32(scale) <= np.float32(threshold)
        row_max = np.where(keep & (threshold > 0), row_max, new)
        maxima.append(row_max)
    return np.stack(maxima, axis=1)


def _reference(scores, scale, values):
    """Return (out, LSE in natural log) in float64; 0 and -inf for rows without visible key."""
    x = scores.astype(np.float64) * scale * math.log(2)
    largest = x.max(axis=1, keepdims=True)
    largest = np.where(np.isneginf(largest), 0, largest)
    p = np.exp(x - largest)
    total = p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + largest)[:, 0]
    return p @ values / np.where(total == 0, 1, total), lse


@pytest.mark.parametrize(
    ("pattern", "threshold", "dtype", "loop", "num_tiles"),
    [
        (HARDWARE_ONLY, 8.0, BFLOAT16, "for", 3),
        (MIXED, 8.0, BFLOAT16, "for", 3),
        (MIXED, 8.0, FLOAT16, "while", 3),
        (MIXED, 0.0, BFLOAT16, "while", 3),  # every growth rescales
        (POLYNOMIAL_ONLY, 8.0, BFLOAT16, "for", 1),
        (Ex2Pattern(16, 4, 1, False, degree=5), 4.0, FLOAT16, "for", 3),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.sampled("*8.0-BFloat16-for-3", "*0.0-BFloat16-while-3", "*4.0-Float16-for-3")
def test_online_softmax(pattern, threshold, dtype, loop, num_tiles):
    scores, scale = _scores(num_tiles), 0.25
    outputs, report = _run(scores, scale, (pattern, threshold, dtype, loop))
    rounded, p, factors, maxima, inverse, lse = outputs

    assert np.array_equal(maxima, _expected_maxima(scores, scale, threshold))
    twin = exponentiate(scores.reshape(ROWS, num_tiles, COLUMNS), scale, maxima, pattern).reshape(
        p.shape
    )
    emulated = [pattern.is_emulated(c // 32 % 4, c % 32, 4) for c in range(p.shape[1])]
    assert np.array_equal(p[:, emulated], twin[:, emulated]), "the polynomial is bit-exact"
    np.testing.assert_allclose(p, twin, rtol=1e-6, atol=1e-37)
    expected = torch.from_numpy(p).to(TORCH[dtype]).float().numpy()
    assert np.array_equal(rounded, expected), "P is p rounded to nearest even"
    assert p.max() <= 2.0**threshold * 1.0001

    # A kept maximum gives a factor of exactly 1; a row's first visible key gives 0.
    first = np.full((ROWS, 1), LOWEST_MAXIMUM, np.float32)
    before = np.concatenate([first, maxima[:, :-1]], axis=1)
    moved = np.exp2((before.astype(np.float64) - maxima) * scale)
    np.testing.assert_allclose(factors, moved, rtol=3e-5, atol=1e-37)
    assert (factors[before == maxima] == 1).all()
    assert (factors[(before == LOWEST_MAXIMUM) & (maxima > LOWEST_MAXIMUM)] == 0).all()

    hardware = COLUMNS - pattern.emulated_count(COLUMNS)
    executed = report.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"]
    assert executed == ROWS * num_tiles * hardware
    if num_tiles > 1:
        check_opcodes(
            opcode_counts(_compiled((pattern, threshold, dtype, loop), num_tiles)), pattern
        )
    _check_result(scores, scale, (p, factors), (inverse, lse))


def check_opcodes(counts, pattern):
    """Check the PTX of a loop over tiles: its instructions follow from the pattern."""
    emulated = pattern.emulated_count(COLUMNS)
    assert counts["ex2.approx.ftz.f32"] == COLUMNS - emulated
    assert counts["ex2.approx.f32"] == 1, "the row factor has an opcode of its own"
    # One folded scale per pair, and one fma per degree and emulated pair.
    assert counts["fma.rn.f32x2"] == COLUMNS // 2 + pattern.degree * emulated // 2
    assert counts["add.rm.f32x2"] == emulated // 2
    assert counts["cvt.rn.bf16x2.f32"] + counts["cvt.rn.f16x2.f32"] == COLUMNS // 2
    # 63 additions join 64 pairs, one takes the old sum in.
    assert counts["add.rn.f32x2"] + counts["add.f32x2"] == 64
    # Three-input maxima take two columns each; each emulated element has a clamp.
    assert counts["max.f32"] - emulated <= COLUMNS // 2 + 4


@pytest.mark.parametrize(
    ("dtype", "threshold", "message"),
    [
        (Float32, 8.0, "P must be BFloat16, Float16 or Float8"),
        (FLOAT16, 16.0, "rescale_threshold is 16.0"),
        (BFLOAT16, -1.0, "rescale_threshold is -1.0"),
    ],
)
def test_unusable_settings_are_refused(dtype, threshold, message):
    with pytest.raises(Exception, match=message):
        _compiled((HARDWARE_ONLY, threshold, dtype, "for"), 3)


def _check_result(scores, scale, accumulation, finished):
    """out and LSE from p, factors, inverse: what the tensor core and the epilogue would do."""
    p, factors = accumulation
    inverse, lse = finished
    values = np.random.default_rng(7).normal(size=(p.shape[1], 8))
    out = np.zeros((ROWS, 8))
    for tile in range(factors.shape[1]):
        columns = slice(tile * COLUMNS, (tile + 1) * COLUMNS)
        out = out * factors[:, tile : tile + 1] + p[:, columns].astype(np.float64) @ values[columns]
    expected_out, expected_lse = _reference(scores, scale, values)
    np.testing.assert_allclose(out * inverse[:, None], expected_out, atol=4 * TOLERANCE)
    empty = np.isneginf(scores).all(axis=1)
    assert (inverse[empty] == 0).all() and np.isneginf(lse[empty]).all() and empty.any()
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=1e-6, atol=TOLERANCE)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 3.0])
def test_extreme_scales(scale):
    """Scale 0 gives the mean over the visible keys; a masked score stays masked (0 * -inf)."""
    scores = _scores(3)
    (_, p, factors, _, inverse, lse), _ = _run(scores, scale, (MIXED, 8.0, BFLOAT16, "for"))
    assert not np.isnan(p).any() and not np.isnan(factors).any()
    assert (p[np.isneginf(scores)] == 0).all()
    _check_result(scores, max(scale, 1e-37), (p, factors), (inverse, lse))


def _capped(x: np.ndarray, cap_scale: float, target: str = "sm_100a") -> np.ndarray:
    x_in, y_out = torch.from_numpy(x), torch.full(x.shape, math.nan)
    arguments = from_dlpack(x_in), from_dlpack(y_out)
    sm100_sim.launch(_compiled_cap(target), *arguments, Float32(cap_scale))
    return y_out.numpy()


@functools.cache
def _compiled_cap(target):
    arguments = [from_dlpack(torch.zeros(ROWS, COLUMNS)) for _ in "xy"]
    return compile_for(target, capped, *arguments, Float32(1), target == "sm_100a")


@pytest.mark.parametrize("cap_scale", [1.0, 1 / 800])
def test_the_softcap_is_tanh(cap_scale):
    """Scores of every size stand beside every other: four scores share a reciprocal."""
    rng = np.random.default_rng(0)
    shape = ROWS, COLUMNS
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 2, shape)
    extremes = [-np.inf, -3e38, -44, -10.4, 0, 1e-30, 10.4, 44, 3e38, np.inf]
    x[: ROWS // 4] = rng.choice(extremes, (ROWS // 4, COLUMNS))
    with np.errstate(over="ignore"):
        x = (x / cap_scale).astype(np.float32)
    expected = np.tanh(x.astype(np.float64) * np.float32(cap_scale))
    found = _capped(x, cap_scale)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-21)
    # sm_90a has no instructions for two at once.
    np.testing.assert_array_equal(_capped(x, cap_scale, "sm_90a"), found)


def test_a_nan_passes_the_softcap():
    """A NaN makes one of its own group of four scores each, and of no other."""
    x = np.zeros((ROWS, COLUMNS), np.float32)
    x[:, 5] = math.nan
    found = np.isnan(_capped(x, 1.0))
    assert found[:, 4:8].all() and found.sum() == 4 * ROWS
