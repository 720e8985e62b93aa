"""A kernel's host object is linked once, whichever threads ask first, and stays linked."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch

from fa4_hd256.run import execute, launch
from fa4_hd256.run.arguments import STREAM
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import CompiledKernel
from fa4_hd256.run.plan import Launch, LaunchPlan


class Module:
    """Result of `load_module`: it owns the code of its functions."""

    def __getitem__(self, prefix: str):
        return SimpleNamespace(to=lambda device: SimpleNamespace(capi_func=lambda address: 0))


@pytest.fixture
def loaded(monkeypatch):
    """Modules that have been linked, slowly, as weak references."""
    found = []

    def load_module(path):
        time.sleep(0.2)  # another thread calls meanwhile
        module = Module()
        found.append(weakref.ref(module))
        return module

    monkeypatch.setattr(cute.runtime, "load_module", load_module)
    return found


def kernel() -> CompiledKernel:
    return CompiledKernel("key", b"object", SimpleNamespace(), "name", "prefix", True, 0.0)


def asked_by_threads(compiled: CompiledKernel, count: int = 6) -> list:
    start, functions = threading.Barrier(count), []

    def ask():
        start.wait()
        functions.append(compiled.function)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return functions


def test_threads_that_ask_at_once_get_one_module(loaded):
    functions = asked_by_threads(kernel())
    assert len(loaded) == 1 and len(functions) == 6 and len(set(map(id, functions))) == 1


def test_two_kernels_have_two(loaded):
    one, other = kernel(), kernel()
    assert one.function is not other.function and len(loaded) == 2


def test_an_execution_keeps_the_module(loaded, monkeypatch):
    """The C function alone owns nothing."""
    monkeypatch.setattr(execute, "compile_kernel", lambda spec: kernel())
    monkeypatch.setattr(execute, "check_convention", lambda compiled, launch: None)
    monkeypatch.setattr(
        launch, "host_function", lambda compiled, device: compiled.function.to(None).capi_func
    )
    spec = KernelSpec("forward", None, None)
    device = torch.device("cpu")
    plan = LaunchPlan(device, (), (), (Launch(spec, (STREAM,)),), ())
    execution = execute.Execution(plan)
    assert execution.run((), ()) == ()
    gc.collect()
    assert loaded[0]() is not None
    del execution
    gc.collect()
    assert loaded[0]() is None
