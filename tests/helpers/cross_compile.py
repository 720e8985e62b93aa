"""Compile small CuTe DSL kernels for sm_100a without a GPU, keeping their PTX."""

import contextlib
from collections import Counter

import cutlass.cute as cute
from cutlass.cutlass_dsl import CuTeDSL

from sm100_sim.host.host_code import keeping_ptx, ptx_of


@contextlib.contextmanager
def target_sm100():
    """While active, CuTe DSL compiles for sm_100a, whatever GPU is here."""
    settings = CuTeDSL._get_dsl().envar
    settings.arch = "sm_100a"
    try:
        yield
    finally:
        del settings.arch


def compile_sm100(function, *arguments, **keywords):
    """`cute.compile` for sm_100a; the result carries its PTX."""
    with keeping_ptx(), target_sm100():
        return cute.compile(function, *arguments, **keywords)


def opcode_counts(compiled) -> Counter:
    """How often each full opcode stands in the compiled PTX, inline assembly included."""
    counts = Counter()
    for line in ptx_of(compiled).splitlines():
        words = line.replace("{", " ").split()
        if words and words[0].startswith("@"):
            words = words[1:]
        if words and "." in words[0] and not words[0].startswith((".", "//", "$")):
            counts[words[0].rstrip(";")] += 1
    return counts
