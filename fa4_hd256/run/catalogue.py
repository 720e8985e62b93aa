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
    compiled in.  The repr of both names all their fields, since it is part of the cache's key.
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
    from fa4_hd256.kernels.blackwell.forward.kernel import ForwardKernel, ForwardVariant
    from fa4_hd256.kernels.masking import MaskKind
    from schedulers import scheduler_class

    from .forward_arguments import ELEMENT_TYPES, compile_arguments

    variant = ForwardVariant(
        MaskKind(problem_class.bounded_left, problem_class.bounded_right),
        problem_class.negative_scale,
        problem_class.softcap,
        problem_class.sink,
        problem_class.ragged,
        problem_class.packed_heads,
        problem_class.split,
    )
    kernel = ForwardKernel(
        config,
        ELEMENT_TYPES[problem_class.dtype],
        variant,
        scheduler_class(problem_class.use_clc),
    )
    return kernel, compile_arguments(problem_class)


def _forward_combine(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.forward.combine import CombineKernel

    from .forward_arguments import ELEMENT_TYPES, combine_compile_arguments

    dtype = ELEMENT_TYPES[problem_class]
    return CombineKernel(config, dtype), combine_compile_arguments(dtype)


def _backward_preprocess(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.preprocess import PreprocessKernel, PreprocessVariant

    from .backward_arguments import preprocess_compile_arguments

    variant = PreprocessVariant(problem_class.lse_gradient, problem_class.ragged)
    return PreprocessKernel(config, variant), preprocess_compile_arguments(problem_class)


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
    from fa4_hd256.kernels.blackwell.backward.common import BackwardVariant
    from fa4_hd256.kernels.masking import MaskKind
    from schedulers import scheduler_class

    from .backward_arguments import gradient_compile_arguments
    from .forward_arguments import ELEMENT_TYPES

    problem = problem_class.problem
    variant = BackwardVariant(
        MaskKind(problem.bounded_left, problem.bounded_right),
        problem.negative_scale,
        problem.softcap,
        problem.ragged,
        problem_class.partial,
        problem_class.stores_ds,
    )
    built = kernel(
        config, ELEMENT_TYPES[problem.dtype], variant, scheduler_class(problem.use_clc)
    )
    return built, gradient_compile_arguments(problem_class, num_results)


#: Kind of kernel -> what builds it from its configuration and problem class.
KINDS: dict[str, Callable[[Any, Any], tuple[Any, tuple]]] = {
    "forward": _forward,
    "forward_combine": _forward_combine,
    "backward_preprocess": _backward_preprocess,
    "backward_dq": _backward_dq,
    "backward_dq_product": _backward_dq_product,
    "backward_dkdv": _backward_dkdv,
}
