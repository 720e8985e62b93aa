"""Every kernel of the package: what it is compiled for, and how it is built and called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "KernelSpec", "build"]


@dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel: everything that its code depends on, beside sources and compiler.

    kind: one of `KINDS`.  config: the kernel's configuration.  problem_class: what of a call is
    compiled in, one of `kernels.problem_class`, or for `forward_combine` the dtype of out.  The
    repr of both names all their fields, since it is part of the cache's key.
    """

    kind: str
    config: Any
    problem_class: Any

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; accepted: {', '.join(KINDS)}")


def build(spec: KernelSpec) -> tuple[Any, tuple]:
    """(kernel, arguments): what `cute.compile` gets, the arguments by type only."""
    return KINDS[spec.kind](spec.config, spec.problem_class)


def _forward(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.forward.kernel import ForwardKernel

    from .forward_arguments import compile_arguments

    return ForwardKernel(config, problem_class), compile_arguments(problem_class)


def _forward_combine(config: Any, dtype: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.forward_combine import CombineKernel
    from fa4_hd256.kernels.problem_class import ELEMENT_TYPES

    from .forward_arguments import combine_compile_arguments

    element = ELEMENT_TYPES[dtype]
    return CombineKernel(config, element), combine_compile_arguments(element)


def _backward_preprocess(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.backward_preprocess import PreprocessKernel

    from .backward_arguments import preprocess_compile_arguments

    return PreprocessKernel(config, problem_class), preprocess_compile_arguments(problem_class)


def _backward_dq(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.dq import DqKernel

    return _gradient_kernel(DqKernel, config, problem_class, num_results=1)


def _backward_dq_product(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.dq_product import DqProductKernel

    return _gradient_kernel(DqProductKernel, config, problem_class, num_results=1)


def _backward_dkdv(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.dkdv import DkdvKernel

    return _gradient_kernel(DkdvKernel, config, problem_class, num_results=2)


def _gradient_kernel(
    kernel: type, config: Any, problem_class: Any, num_results: int
) -> tuple[Any, tuple]:
    from .backward_arguments import gradient_compile_arguments

    return kernel(config, problem_class), gradient_compile_arguments(problem_class, num_results)


#: Kind of kernel -> what builds it from its configuration and problem class.
KINDS: dict[str, Callable[[Any, Any], tuple[Any, tuple]]] = {
    "forward": _forward,
    "forward_combine": _forward_combine,
    "backward_preprocess": _backward_preprocess,
    "backward_dq": _backward_dq,
    "backward_dq_product": _backward_dq_product,
    "backward_dkdv": _backward_dkdv,
}
