"""Every kernel of the package: which of them a call takes, in which configuration, and how each is
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.backward_preprocess import PreprocessConfig
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.forward_combine import CombineConfig

__all__ = [
    "KINDS",
    "RESULTS",
    "KernelSpec",
    "backward_specs",
    "build",
    "combine_spec",
    "forward_spec",
    "preprocess_spec",
]


#: What the kernels of a backward make, by their names: with dS stored and without.
RESULTS = {"dv": ("dv",), "products": ("dk", "dq"), "dkdv": ("dk", "dv"), "dq": ("dq",)}


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


def forward_spec(problem: Problem, gpu: Gpu, config: ForwardConfig | None) -> KernelSpec:
    """The forward's kernel; config: None for the default one of the call on this GPU."""
    if config is None:
        causal = problem.options.window[1] is not None
        config = ForwardConfig.tuned(causal, problem.max_seqlen_k, gpu.tuning_name)
    return KernelSpec("forward", config, problem.problem_class)


def combine_spec(problem: Problem) -> KernelSpec:
    """The kernel after a forward whose keys are divided."""
    return KernelSpec("forward_combine", CombineConfig(), problem.dtype)


def backward_specs(problem: BackwardProblem, config: BackwardConfig) -> dict[str, KernelSpec]:
    """The kernels of a divided backward by name, in the order in which they run: "preprocess", then
    those of `RESULTS` for a dS that is stored, or for one that is not."""
    kinds = ("dv", "products") if problem.keeps_ds else ("dkdv", "dq")
    classes = {"dq": problem.dq_class}
    return {"preprocess": preprocess_spec(problem)} | {
        name: KernelSpec(
            f"backward_{name}", config.of_kernel(f"backward_{name}"),
            classes.get(name, problem.dkdv_class),
        )
        for name in kinds
    }  # fmt: skip


def preprocess_spec(problem: BackwardProblem) -> KernelSpec:
    return KernelSpec("backward_preprocess", PreprocessConfig(), problem.preprocess_class)


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

    return _gradient_kernel(DqKernel, config, problem_class, RESULTS["dq"])


def _backward_dkdv(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.dkdv import DkdvKernel

    return _gradient_kernel(DkdvKernel, config, problem_class, RESULTS["dkdv"])


def _backward_dv(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.dv import DvKernel

    return _gradient_kernel(DvKernel, config, problem_class, RESULTS["dv"], has_ds=True)


def _backward_products(config: Any, problem_class: Any) -> tuple[Any, tuple]:
    from fa4_hd256.kernels.blackwell.backward.products import ProductsKernel

    return _gradient_kernel(ProductsKernel, config, problem_class, RESULTS["products"], has_ds=True)


def _gradient_kernel(
    kernel: type, config: Any, problem_class: Any, results: tuple[str, ...], has_ds: bool = False
) -> tuple[Any, tuple]:
    from .backward_arguments import gradient_compile_arguments

    arguments = gradient_compile_arguments(problem_class, results, has_ds)
    return kernel(config, problem_class), arguments


#: Kind of kernel -> what builds it from its configuration and problem class.
KINDS: dict[str, Callable[[Any, Any], tuple[Any, tuple]]] = {
    "forward": _forward,
    "forward_combine": _forward_combine,
    "backward_preprocess": _backward_preprocess,
    "backward_dq": _backward_dq,
    "backward_dkdv": _backward_dkdv,
    "backward_dv": _backward_dv,
    "backward_products": _backward_products,
}
