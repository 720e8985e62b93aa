"""Compile small CuTe DSL kernels without a GPU, keeping their PTX."""

import contextlib
from collections import Counter

import cutlass.cute as cute
from cutlass.cutlass_dsl import CuTeDSL

from sm100_sim.host.host_code import keeping_ptx, ptx_of


@contextlib.contextmanager
def targeting(target: str = "sm_100a"):
    """Let CuTe DSL compile for a target, whatever GPU is here."""
    settings = CuTeDSL._get_dsl().envar
    settings.arch = target
    try:
        yield
    finally:
        del settings.arch


def compile_sm100(function, *arguments, **keywords):
    """`cute.compile` for sm_100a; the result carries its PTX."""
    return compile_for("sm_100a", function, *arguments, **keywords)


def compile_for(target: str, function, *arguments, **keywords):
    """`cute.compile` for a target; the result carries its PTX."""
    with keeping_ptx(), targeting(target):
        return cute.compile(function, *arguments, **keywords)


def opcode_counts(compiled) -> Counter:
    """Count each full opcode in the compiled PTX, inline assembly included."""
    counts = Counter()
    for line in ptx_of(compiled).splitlines():
        words = line.replace("{", " ").split()
        if words and words[0].startswith("@"):
            words = words[1:]
        if words and "." in words[0] and not words[0].startswith((".", "//", "$")):
            counts[words[0].rstrip(";")] += 1
    return counts
