"""Instruction semantics: one table, filled by the modules of this package."""

from __future__ import annotations

import importlib

#: Modules whose import registers their rows in the table.
MODULES = (
    "arithmetic.approximate", "arithmetic.bits", "arithmetic.convert", "arithmetic.floating",
    "arithmetic.integer", "arithmetic.lanes", "arithmetic.matrix", "arithmetic.memory",
    "arithmetic.move", "arithmetic.narrow", "atomics", "calls", "clc", "control",
    "copies.copy_async", "copies.store_async", "copies.tensormap_ops", "copies.tma", "order",
    "sync", "tensor.mma_sync", "tensor.tcgen05", "tensor.tcgen05_copy", "tensor.tcgen05_data",
    "tensor.wgmma",
)  # fmt: skip


def load_table() -> None:
    """Import every module of the package that has instructions."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
