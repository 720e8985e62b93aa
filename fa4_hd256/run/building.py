"""Kernels of the catalogue as `cute.compile` takes them: an object to trace, and arguments by type.

Modules of kernels' code are imported when one is built, so that a process whose kernels are all
compiled does not import them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..kernels.kernel_set import kinds
from ..kernels.problem_class import OF_BLOCKS, ProblemClass
from .catalogue import KINDS, KernelSpec


def build(spec: KernelSpec) -> tuple[Any, tuple]:
    """Return (kernel, arguments) for `cute.compile`, the arguments by type only; `tracing` compiles
    them. Raises NotImplementedError for a kernel that the architecture does not have, ValueError
    for a configuration that cannot work (`kernels.proof`)."""
    return BUILDERS[spec.kind](spec)


def _tile_kernel(spec: KernelSpec, problem_class: ProblemClass, cluster: int) -> Any:
    """The kernel with its parts. cluster: CTAs of one. Raises ValueError for a configuration whose
    kernel would hang, or misuse its memory."""
    from ..kernels.backward.score_slopes import GradientFunctions
    from ..kernels.context import KernelParts
    from ..kernels.functions.kernel_functions import KernelFunctions
    from ..kernels.functions.user_functions import functions_in
    from ..kernels.proof.plans import prove
    from ..schedulers import scheduler_class

    prove(spec.kernels, spec.config)
    scheduler = scheduler_class(problem_class.use_clc, cluster, counts=spec.kernels.counts_tiles)
    is_forward = spec.problem_class is problem_class
    functions = (KernelFunctions if is_forward else GradientFunctions)(
        problem_class, *functions_in(problem_class)
    )
    keys = spec.kernels.keys_of(problem_class) if is_forward else None
    parts = KernelParts(scheduler, functions, keys)
    return spec.kernels.kernel(spec.kind)(spec.config, spec.problem_class, parts)


def _forward(spec: KernelSpec) -> tuple[Any, tuple]:
    from .argument_types import compile_arguments

    kernel = _tile_kernel(spec, spec.problem_class, spec.config.tiles.cluster)
    columns = spec.config.tiles.takes_columns
    return kernel, compile_arguments(spec.problem_class, spec.scalars, columns)


def _forward_combine(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.small.forward_combine import CombineKernel
    from .argument_types import combine_compile_arguments

    kernel = CombineKernel(spec.config, spec.problem_class)
    return kernel, combine_compile_arguments(spec.problem_class, spec.scalars)


def _forward_combine_ragged(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.small.forward_combine import RaggedCombineKernel
    from .argument_types import combine_compile_arguments

    kernel = RaggedCombineKernel(spec.config, spec.problem_class)
    return kernel, combine_compile_arguments(spec.problem_class, spec.scalars, listed=True)


def _append_rows(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.small.append_rows import AppendKernel
    from .argument_types import append_compile_arguments

    kernel = AppendKernel(spec.config, spec.problem_class)
    return kernel, append_compile_arguments(spec.problem_class)


def _backward_preprocess(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.small.backward_preprocess import PreprocessKernel
    from .argument_types import preprocess_compile_arguments

    kernel = PreprocessKernel(spec.config, spec.problem_class)
    return kernel, preprocess_compile_arguments(spec.problem_class, spec.scalars)


def _backward_sum(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.problem_class import ELEMENT_TYPES
    from ..kernels.small.backward_sum import SumKernel
    from .argument_types import sum_compile_arguments

    element = ELEMENT_TYPES[spec.problem_class]
    return SumKernel(spec.config, element), sum_compile_arguments(element)


def _tail_rows(spec: KernelSpec) -> tuple[Any, tuple]:
    from ..kernels.small.tail_rows import TailKernel
    from .argument_types import tail_compile_arguments

    kernel = TailKernel(spec.config, spec.problem_class)
    return kernel, tail_compile_arguments(spec.problem_class)


def _gradients(spec: KernelSpec) -> tuple[Any, tuple]:
    from .argument_types import gradient_compile_arguments

    problem_class = spec.problem_class.problem
    backward = spec.kernels.backward_set(problem_class.descale == OF_BLOCKS)
    kernel = _tile_kernel(spec, problem_class, backward.cluster)
    row = backward.kernel(spec.kind)
    return kernel, gradient_compile_arguments(
        spec.problem_class, row.results, row.has_ds, spec.scalars
    )


def _own(kind: str) -> Callable[[KernelSpec], tuple[Any, tuple]]:
    return _forward if kind.startswith("forward") else _gradients


#: Kind of kernel -> what builds it, one for each of `KINDS`.
BUILDERS: dict[str, Callable[[KernelSpec], tuple[Any, tuple]]] = {
    "append_rows": _append_rows,
    "forward_combine": _forward_combine,
    "forward_combine_ragged": _forward_combine_ragged,
    "backward_preprocess": _backward_preprocess,
    "backward_sum": _backward_sum,
    "tail_rows": _tail_rows,
    **{kind: _own(kind) for kind in sorted(kinds())},
}
assert BUILDERS.keys() == KINDS
