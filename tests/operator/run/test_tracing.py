"""Requests to the compiler, and answers that are accepted; nothing is compiled."""

from __future__ import annotations

import gc
import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass.cutlass_dsl import CuTeDSL

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.gpus import family
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run import tracing
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.tracing import targeting, trace_and_compile

BLACKWELL, HOPPER = ARCHITECTURES
SPEC = SimpleNamespace(problem_class=None, architecture=None)


def host_function(
    q: ProblemClass, k: int, out: list[KernelSpec], lse: dict[str, list[int]]
) -> None:
    """Parameters of this package's types, bare and inside others, and of none."""


@dataclass
class Compiler:
    """Stand-in for `cute.compile`: notes what it is given, and answers with these artifacts."""

    ptx: str = "ptx"
    cubin: bytes = b"cubin"

    def __getitem__(self, options):
        settings = CuTeDSL._get_dsl().envar
        self.options = {type(option).__name__: option.value for option in options}

        def compiled(kernel, *arguments):
            self.given, self.arch = (kernel, *arguments), settings.arch
            return SimpleNamespace(
                artifacts=SimpleNamespace(PTX=self.ptx, CUBIN=self.cubin),
                execution_args=SimpleNamespace(
                    signature=inspect.signature(host_function, eval_str=True)
                ),
            )

        return compiled


@pytest.fixture
def compiling(monkeypatch):
    """Returns a function from a stand-in to what `trace_and_compile` makes of its answer."""
    monkeypatch.setattr(tracing, "check_unchanged", lambda problem_class: None)
    monkeypatch.setattr(tracing, "build", lambda spec: ("kernel", (1, 2)))
    monkeypatch.setattr(family, "target", lambda architecture: "sm_103a")

    def through(compiler):
        monkeypatch.setattr(cute, "compile", compiler)
        return trace_and_compile(SPEC)

    return through


@pytest.mark.parametrize("answer", [{"ptx": ""}, {"cubin": b""}, {"ptx": "", "cubin": b""}])
def test_an_answer_without_code_is_refused(compiling, answer):
    with pytest.raises(RuntimeError, match="returned no PTX or no cubin; unset CUTE_DSL_DRYRUN"):
        compiling(Compiler(**answer))


def test_the_signature_names_no_class_of_the_package(compiling):
    """A copy of the package under another name reads it; types of others stay."""
    parameters = compiling(Compiler()).execution_args.signature.parameters
    assert list(parameters) == ["q", "k", "out", "lse"]
    empty = inspect.Parameter.empty
    found = [parameter.annotation for parameter in parameters.values()]
    assert found == [empty, int, empty, dict[str, list[int]]]


def test_functions_that_changed_are_not_compiled(monkeypatch):
    def changed(problem_class):
        raise ValueError("changed")

    monkeypatch.setattr(tracing, "check_unchanged", changed)
    monkeypatch.setattr(tracing, "build", lambda spec: pytest.fail("it was built"))
    with pytest.raises(ValueError, match="changed"):
        trace_and_compile(SPEC)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(monkeypatch, is_enabled):
    """A trace that fails leaves the collector as it was, too."""

    def failing(spec):
        assert not gc.isenabled()
        raise KeyError

    monkeypatch.setattr(tracing, "check_unchanged", lambda problem_class: None)
    monkeypatch.setattr(tracing, "build", failing)
    assert gc.isenabled()
    try:
        if not is_enabled:
            gc.disable()
        with pytest.raises(KeyError):
            trace_and_compile(SPEC)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("requested", "target", "accepted"),
    [
        ("sm_90a", "sm_100f", ", ".join(BLACKWELL.targets)),
        ("sm_100a", "sm_90a", ", ".join(HOPPER.targets)),
        ("sm_120a", "sm_120f", "sm_120f"),
    ],
)
def test_another_architecture_of_the_user_is_refused(monkeypatch, requested, target, accepted):
    monkeypatch.setenv("CUTE_DSL_ARCH", requested)
    message = f"CUTE_DSL_ARCH is {requested}, but .* compiled for {target}; .* one of {accepted}"
    with pytest.raises(RuntimeError, match=message), targeting(target):
        pytest.fail("the body ran")


def test_the_convention_of_tvm_is_refused(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "enable_tvm_ffi", True)
    with pytest.raises(RuntimeError, match="unset CUTE_DSL_ENABLE_TVM_FFI"), targeting("sm_100f"):
        pytest.fail("the body ran")
