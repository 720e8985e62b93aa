"""Tensor maps for the driver to encode: many shapes, and some it must refuse."""

from __future__ import annotations

import math
from dataclasses import replace

from sm100_sim.state.tensormap import DTYPES, TensorMap

from .. import inputs as make

_ADDRESS = 0x7F12_3456_7000


def requests() -> list[TensorMap]:
    """Tensor maps in a fixed order; `tf32` with "f32" or "f32.ftz" is the driver's TFLOAT32."""
    return [*_one_at_a_time(), *_random(160), *_limits()]


_BASE = TensorMap(
    _ADDRESS,
    "bf16",
    (256, 1000, 16, 3),
    (512, 512000, 8192000),
    (64, 128, 1, 1),
    (1, 1, 1, 1),
    128,
    version=0,
)


def _one_at_a_time() -> list[TensorMap]:
    """Every value of each field, the others as in a usual attention tensor."""
    base = _BASE
    # The packed 4-bit type is refused for devices before compute capability 10.0.
    found = [
        replace(base, dtype=name, swizzle=0, box=(32, 4, 1, 1))
        for name, bits in DTYPES.values()
        if bits >= 8
    ]
    found += [
        replace(base, swizzle=span, box=(span // 2 or 64, 8, 1, 1)) for span in (0, 32, 64, 128)
    ]
    found += [replace(base, l2_promotion=size) for size in (0, 64, 128, 256)]
    found += [
        replace(base, dtype=dtype, nan_fill=True, swizzle=0, box=(32, 4, 1, 1))
        for dtype in ("f16", "bf16", "f32", "f32.ftz", "f64")
    ]
    found += [
        replace(base, dtype=dtype, tf32=True, swizzle=0, box=(32, 4, 1, 1), nan_fill=fill)
        for dtype in ("f32", "f32.ftz")
        for fill in (False, True)
    ]
    for rank in range(1, 6):
        sizes = (256, 1000, 16, 3, 7)[:rank]
        strides = (512, 512000, 8192000, 24576000)[: rank - 1]
        found.append(
            replace(
                base,
                sizes=sizes,
                strides=strides,
                box=(64, 128, 1, 1, 2)[:rank],
                element_strides=(1,) * rank,
            )
        )
    for dimension in range(4):
        for step in range(1, 9):
            steps = [1, 1, 1, 1]
            steps[dimension] = step
            found.append(replace(base, element_strides=tuple(steps), swizzle=0, box=(64, 16, 8, 8)))
    for interleave in (16, 32):
        swizzle = 32 if interleave == 32 else 0
        found.append(replace(base, interleave=interleave, swizzle=swizzle, box=(8, 16, 2, 1)))
    return found


def _random(count: int) -> list[TensorMap]:
    """Descriptors within the limits, from strides of a few bytes to nearly 2^40."""
    found = []
    for number in range(count):
        draws = [int(v) for v in make.scrambled(700 + number, 40)]

        def pick(choices, draws=draws):
            return choices[draws.pop() % len(choices)]

        rank = pick((1, 2, 3, 4, 5))
        dtype = pick([name for name, bits in DTYPES.values() if bits >= 8])
        bits = dict(DTYPES.values())[dtype]
        swizzle = pick((0, 32, 64, 128))
        inner = (swizzle or pick((16, 32, 64, 128))) * 8 // bits
        sizes = tuple(
            pick((1, 2, 7, 100, 4096, 65537, 1 << 20, (1 << 31) + 5, (1 << 32) - 1, 1 << 32))
            for _ in range(rank)
        )
        strides = tuple(
            16 * pick((1, 3, 64, 4096, 1 << 20, (1 << 28) + 3, (1 << 32) + 5, (1 << 36) - 1))
            for _ in range(rank - 1)
        )
        box = [inner]
        for _ in range(rank - 1):
            extent = pick((1, 2, 5, 64, 255, 256))
            fits = math.prod(box) * extent * bits // 8 < 1 << 18
            box.append(extent if fits else 1)
        steps = (1, *(pick((1, 1, 1, 2, 3, 8)) for _ in range(rank - 1)))
        found.append(TensorMap(
            16 * pick((1, 0x123456, 0x7F0000001, 0xFFFFFFFFF)), dtype, sizes, strides,
            tuple(box), steps, swizzle, 0, pick((False, True)) and dtype[0] in "fb", False,
            pick((0, 64, 128, 256)), 0,
        ))  # fmt: skip
    return found


def _limits() -> list[TensorMap]:
    """Each limit met and passed."""
    flat = replace(_BASE, swizzle=0)
    return [
        replace(flat, address=_ADDRESS + 16),
        replace(flat, address=_ADDRESS + 8),
        replace(flat, strides=(496, 512000, 8192000)),
        replace(flat, strides=(0, 512000, 8192000)),
        replace(flat, strides=(520, 512000, 8192000)),
        replace(flat, strides=(512, 512000, (1 << 40) - 16)),
        replace(flat, strides=(512, 512000, 1 << 40)),
        replace(flat, sizes=(0, 1000, 16, 3)),
        replace(flat, sizes=((1 << 32) + 1, 1000, 16, 3)),
        replace(flat, box=(64, 256, 1, 1)),
        replace(flat, box=(64, 257, 1, 1)),
        replace(flat, box=(0, 8, 1, 1)),
        replace(flat, box=(4, 8, 1, 1)),
        replace(flat, box=(256, 8, 1, 1)),
        replace(flat, box=(264, 8, 1, 1)),
        replace(flat, box=(64, 256, 8, 1)),
        replace(flat, box=(256, 256, 16, 3)),
        replace(flat, element_strides=(1, 9, 1, 1)),
        replace(flat, element_strides=(1, 0, 1, 1)),
        replace(flat, swizzle=128, box=(72, 8, 1, 1)),
        replace(flat, swizzle=128, box=(32, 8, 1, 1)),
        replace(flat, swizzle=64, box=(32, 8, 1, 1)),
        replace(flat, swizzle=64, box=(64, 8, 1, 1)),
        replace(flat, swizzle=32, box=(16, 8, 1, 1)),
        replace(flat, swizzle=32, box=(32, 8, 1, 1)),
        replace(flat, dtype="s32", nan_fill=True, box=(32, 8, 1, 1)),
        replace(flat, dtype="u8", nan_fill=True),
        replace(flat, dtype="u8", box=(8, 8, 1, 1)),
    ]
