"""Names of the targets of `python -m lab mutation`, without the kernels.

A mistyped name is refused from here alone: nothing that this module imports takes long to load.
`lab/tests/test_lab_options.py` compares them with `mutation_targets.targets`.
"""

from __future__ import annotations

from collections.abc import Iterator

_OF_PACKED = ("varlen, causal", "varlen, window, softcap, sink", "varlen, causal, score_mod")
_OF_CACHES = (
    "keys in pages", "keys in parts", "few rows", "few rows, tree mask", "few rows, keys in pages",
    "few rows, keys in parts", "few rows, listed parts", "few rows, e4m3",
    "few rows, e4m3, keys in pages",
)  # fmt: skip
_FORWARDS = "full", *_OF_PACKED, "block mask", "mask_mod", *_OF_CACHES
_BACKWARDS = (
    "dV and dS, varlen, causal", "dK and dQ from dS, varlen, causal", "dQ, varlen, causal",
    "dV and dS, varlen, causal, score_mod", "dV and dS, block mask",
    "dK and dQ from dS, block mask", "dV and dS, mask_mod",
)  # fmt: skip


def _names() -> Iterator[str]:
    for scheduler in ("static", "dynamic"):
        for case in (*_FORWARDS, "e4m3", "mxfp8", "causal", "64 rows", "64 rows, e4m3"):
            yield f"forward, {case}, {scheduler}"
        for case in (*_BACKWARDS, "dK/dV, varlen, causal"):
            yield f"{case}, {scheduler}"
        for case in _FORWARDS:
            yield f"Hopper forward, {case}, {scheduler}"
        for case in (*_BACKWARDS, "dK, varlen, causal", "dV, varlen, causal"):
            yield f"Hopper {case}, {scheduler}"
    yield from ("forward combine", "flash-attn-4 forward, full", "flash-attn-4 forward, causal")


#: Every target, by name.
TARGETS = tuple(_names())
