"""Mixes of hardware and polynomial exp2: which there are, their error, their time on a GPU.

Errors are of the numpy twin; `accuracy` has those of the compiled forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.suite import Case
from fa4_hd256.kernels.blackwell.forward.config import E4M3_CONFIG, P_LOG2, ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.kernel_names import in_words
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from fa4_hd256.softmax_emu.reference_twin import exponentiate, round_to_bfloat16

from .checking import check_forward
from .providers import Inputs, Ours
from .settings import Sampling
from .timer import CudaTimer, interleave

#: Columns of a step, to which a pattern is applied.
BLOCK = ForwardConfig.block_kv
#: Length that represents each class of `tuning.SEQLEN_CLASSES`; 32k tokens, or one sequence.
SEQLENS = {"short": 1024, "medium": 8192, "long": 65536}
HEADS = (16, 2)


@dataclass(frozen=True)
class Times:
    """Times of one mix and class. seconds: median, p20 and p80, or of all replays, the central one
    first.

    bound: what decides the modelled time. step_clocks: modelled, of a step of a CTA pair: what the
    mix can change where HBM or other work decides the time. figures: further columns of a row.
    """

    seconds: np.ndarray
    bound: str | None = None
    step_clocks: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """Errors of one mix. exp2: largest relative error of an exp2; out: relative L2, P in bf16 or
    e4m3."""

    exp2: float
    out: float


def error_of(pattern: Ex2Pattern, is_e4m3: bool = False) -> Error:
    """Errors by the numpy twin, bit-exact with the device code where the polynomial is used.
    is_e4m3: P is rounded to e4m3, 2^4 times as large. The scores are those of standard normal q and
    k at softmax scale 1/16; products are in float64."""
    rows, keys, generator = 64, 512, np.random.default_rng(0)
    scores = generator.standard_normal((rows, keys)).astype(np.float32) * np.float32(16)
    values = generator.standard_normal((keys, HEAD_DIM))
    scale_log2, top = np.log2(np.e) / 16, scores.max(axis=1)
    steps = np.split(scores, range(BLOCK, keys, BLOCK), axis=1)
    found = np.hstack([exponentiate(step, scale_log2, top, pattern) for step in steps])
    exact = np.exp2((scores.astype(np.float64) - top[:, None]) * float(np.float32(scale_log2)))
    relative = np.abs(found / exact - 1)
    rounded = _round_to_e4m3(found) if is_e4m3 else round_to_bfloat16(found)
    out = (rounded @ values) / found.sum(axis=1, dtype=np.float64)[:, None]
    expected = (exact @ values) / exact.sum(axis=1)[:, None]
    distance = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # Exponents far below the row's maximum are rounded as arguments, on both paths alike.
    return Error(float(relative[exact > 2.0**-8].max()), float(distance))


def _round_to_e4m3(p: np.ndarray) -> np.ndarray:
    """Return P as the tensor core reads it, without the factor 2^P_LOG2 that it has there."""
    factor = 2.0**P_LOG2
    codes = torch.from_numpy(p.astype(np.float32) * np.float32(factor)).to(torch.float8_e4m3fn)
    return codes.double().numpy() / factor


def grid(axes: dict[str, Sequence[int]], last_fragment_hardware: bool) -> list[Ex2Pattern]:
    """Hardware only, then the mixes of all combinations that differ in an element or a degree.
    axes: values of ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg and degree; of a combination with
    res above freq there is none. Raises ValueError for a value that no pattern accepts."""
    found = {_elements(HARDWARE_ONLY): HARDWARE_ONLY}
    for freq, res, start, degree in itertools.product(*axes.values()):
        if res > freq > 0:
            continue
        pattern = Ex2Pattern(freq, res if freq else 0, start, last_fragment_hardware, degree)
        found.setdefault(_elements(pattern), pattern)
    return list(found.values())


def _elements(pattern: Ex2Pattern) -> tuple:
    """Return what is compiled: the emulated columns of a step, and how."""
    fragments, columns = BLOCK // 32, range(32)
    emulated = tuple(
        pattern.is_emulated(f, c, fragments) for f in range(fragments) for c in columns
    )
    return emulated, pattern.degree if any(emulated) else None


def case_of(seqlen: int, causal: bool) -> Case:
    """The problem that stands for a class of lengths."""
    return Case("sweep", ((seqlen, seqlen),) * max(1, 32768 // seqlen), *HEADS, causal)


def config_of(pattern: Ex2Pattern, is_e4m3: bool = False) -> ForwardConfig:
    """Return the forward's configuration with a mix; is_e4m3: for q, k and v in e4m3."""
    return replace(E4M3_CONFIG if is_e4m3 else ForwardConfig(), ex2_pattern=pattern)


def measured_times(
    patterns: Sequence[Ex2Pattern], causal: bool, timer: CudaTimer, sampling: Sampling
) -> Iterator[tuple[tuple[Ex2Pattern, str], Times]]:
    """Time every mix and class, the mixes of a class interleaved, and yield each. In bf16. Raises
    RuntimeError if a result is wrong."""
    for name, seqlen in SEQLENS.items():
        inputs = Inputs.random(case_of(seqlen, causal), timer.device, torch.bfloat16)
        calls: dict[Any, Callable[[], Any]] = {}
        for pattern in patterns:
            provider = Ours(config=config_of(pattern))
            check = check_forward(inputs, provider.call(inputs))
            if not check.passed:
                mix = in_words(pattern) or "hardware exp2"
                raise RuntimeError(f"{mix}: error {check.error}, accepted {check.tolerance}")
            calls[pattern] = partial(provider.call, inputs)
        timed: dict[Any, Any] = interleave(timer, calls, sampling)
        for pattern, samples in timed.items():
            quantiles = [samples.quantile(share) for share in (0.5, 0.2, 0.8)]
            yield (pattern, name), Times(np.array(quantiles))
