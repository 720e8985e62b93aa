"""Microbenchmarks of the whole GPU, by the driver's events: rates, launches, clock, power."""

from __future__ import annotations

from typing import Any

from .table import Micro
from .timed import COPY, SHARED, Timed, init_barriers, timed, wait

_BLOCK, _BLOCKS, _ROUNDS = 32 << 10, 4, 96


def _stream(sms: int, moves: bool) -> Timed:
    """Each SM keeps 128 KiB on the way: new ones all the time, or always the same ones."""
    step = _BLOCK * _BLOCKS
    copies = "".join(
        f"@%first {COPY} [%pool+{_BLOCK * i}], [%d{i}], {_BLOCK}, [%bar];\n" for i in range(_BLOCKS)
    )
    advance = "".join(f"add.u64 %d{i}, %d{i}, {step};\n" for i in range(_BLOCKS)) if moves else ""
    body = (
        f"@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {step};\n{copies}"
        f"{wait('WAITING')}xor.b32 %parity, %parity, 1;\n{advance}"
    )
    own = step * _ROUNDS if moves else step
    setup = (
        init_barriers()
        + f"mul.wide.u32 %at, %cta, {own};\nadd.u64 %far, %buf, %at;\n"
        + "".join(f"add.u64 %d{i}, %far, {_BLOCK * i};\n" for i in range(_BLOCKS))
    )
    name = f"{_ROUNDS} times 128 KiB of every SM, {'HBM' if moves else 'L2'}"
    shape: dict[str, Any] = {"rounds": _ROUNDS, "grid": sms, "shared": SHARED, "buffer": own * sms}
    return timed(name, body, setup=setup, **shape)


def _nothing(grid: int, shared: int, name: str) -> Timed:
    return timed(name, "", rounds=1, grid=grid, shared=shared)


def _busy(rounds: int, sms: int) -> Timed:
    """FMA and exp2 on every SM."""
    lines = ["ex2.approx.ftz.f32 %f0, %f0;", "fma.rn.f32 %f1, %f1, %f1, %acc;"] * 16
    setup = "cvt.rn.f32.u32 %acc, %lane;\nmov.f32 %f0, %acc;\nmov.f32 %f1, %acc;\n"
    keep = (
        "add.f32 %f0, %f0, %f1;\nsetp.eq.f32 %done, %f0, 0f7F7FFFFF;\n"
        "@%done st.global.f32 [%buf], %f0;\n"
    )
    name, body = f"{rounds} rounds of exp2 and FMA", "\n".join(lines)
    return timed(name, body, setup=setup, keep=keep, rounds=rounds, grid=sms, warps=4)


def table(sms: int, sets_clock: bool) -> tuple[Micro, ...]:
    """All of this module, for a GPU of so many SMs. sets_clock: no figure of tensor cores does."""
    total = _BLOCK * _BLOCKS * _ROUNDS * sms
    waves = 200
    one = _nothing(sms, SHARED, "a wave of empty CTAs")
    more = _nothing(sms * (waves + 1), SHARED, f"{waves + 1} waves of empty CTAs")
    return (
        Micro("L2 rate", "TB/s", (_stream(sms, False),), lambda s: total / s / 1e12,
              "l2_terabytes", "bulk loads of all SMs, hits in L2", seconds=True),
        Micro("HBM rate", "TB/s", (_stream(sms, True),), lambda s: total / s / 1e12,
              "hbm_terabytes", "bulk loads of all SMs from more than L2 holds", seconds=True),
        Micro("launch", "microseconds", (_nothing(1, 0, "one empty CTA"),), lambda s: s * 1e6,
              "launch_us", "each further empty kernel of a CUDA graph", seconds=True),
        Micro("CTA reuse", "microseconds", (one, more), lambda a, b: (b - a) / waves * 1e6, "",
              f"each further wave of empty CTAs of {SHARED >> 10} KiB", seconds=True),
        Micro("SM clock under load", "GHz", (_busy(800000, sms),), lambda s: s,
              "clock_ghz" if sets_clock else "",
              "clocks of a kernel of some fifty milliseconds over its seconds", seconds=True),
    )  # fmt: skip
