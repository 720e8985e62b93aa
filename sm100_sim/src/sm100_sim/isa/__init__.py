"""Instruction semantics: one table, filled by the modules of this package."""

from __future__ import annotations

import importlib

#: Modules whose import registers their rows in the table.
MODULES = (
    "arithmetic.approximate", "arithmetic.bits", "arithmetic.convert", "arithmetic.floating",
    "arithmetic.integer", "arithmetic.lanes", "arithmetic.matrix", "arithmetic.memory",
    "arithmetic.move", "arithmetic.narrow", "atomics", "calls", "clc", "control", "copy_async",
    "mma_sync", "order", "store_async", "sync", "tcgen05", "tcgen05_copy", "tcgen05_data",
    "tensormap_ops", "tma", "wgmma",
)  # fmt: skip


def load_table() -> None:
    """Import every module of the package that has instructions."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
