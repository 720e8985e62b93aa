"""Quick look-ups of source lines leave kernels as they are."""

import sys

import pytest
import source_lines
import torch
from source_lines import once_per_code, once_per_instruction

from fa4_hd256.kernels.small.backward_preprocess import PreprocessClass, PreprocessConfig
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.tracing import trace_and_compile

pytest.importorskip("cutlass")


def test_ptx_and_its_lines_are_those_of_plain_look_ups(monkeypatch):
    assert source_lines.look_up_once(), "CuTe DSL has other look-ups: tracing takes longer"
    spec = KernelSpec("backward_preprocess", PreprocessConfig(), PreprocessClass(torch.bfloat16))
    quick = trace_and_compile(spec).artifacts.PTX
    for module, name, _ in source_lines.REPLACED:
        home, name = source_lines.place_of(module, name)
        monkeypatch.setattr(home, name, getattr(home, name).__wrapped__)
    assert trace_and_compile(spec).artifacts.PTX == quick
    assert "fa4_hd256/kernels/small/backward_preprocess.py" in quick and ".loc" in quick


def test_each_instruction_is_looked_up_once():
    calls = []

    def line(frame):
        calls.append(frame.f_lineno)
        return frame.f_lineno

    by_instruction, by_code = once_per_instruction(line), once_per_code(line)

    def look_up(of):
        first = of(sys._getframe())
        return first, of(sys._getframe())

    first = look_up(by_instruction)
    assert first[1] == first[0] + 1 and look_up(by_instruction) == first and len(calls) == 2
    assert look_up(by_code) == (first[0],) * 2 and len(calls) == 3
