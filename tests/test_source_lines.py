"""Quick look-ups of source lines leave kernels as they are."""

import pytest
import source_lines
import torch

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
