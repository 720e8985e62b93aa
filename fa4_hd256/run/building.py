"""Kernels of the catalogue as `cute.compile` takes them: an object to trace, and arguments by type.

Modules of kernels' code are imported when one is built, so that a process whose kernels are all
compiled does not import them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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
    from ..kernels.backward.common import GradientFunctions
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


#: Kinds of kernels without tensor cores -> "module:class" below `kernels.small`, made as
#: `class(config, problem_class)`, and its arguments by type.
_SMALL: dict[str, tuple[str, Callable[[Any, KernelSpec], tuple]]] = {
    "append_rows": (
        "append_rows:AppendKernel",
        lambda types, spec: types.append_compile_arguments(spec.problem_class),
    ),
    "forward_combine": (
        "forward_combine:CombineKernel",
        lambda types, spec: types.combine_compile_arguments(spec.problem_class, spec.scalars),
    ),
    "forward_combine_ragged": (
        "forward_combine:RaggedCombineKernel",
        lambda types, spec: types.combine_compile_arguments(spec.problem_class, spec.scalars, True),
    ),
    "backward_preprocess": (
        "backward_preprocess:PreprocessKernel",
        lambda types, spec: types.preprocess_compile_arguments(spec.problem_class, spec.scalars),
    ),
    "backward_sum": (
        "backward_sum:SumKernel",
        lambda types, spec: types.sum_compile_arguments(spec.problem_class),
    ),
    "tail_rows": (
        "tail_rows:TailKernel",
        lambda types, spec: types.tail_compile_arguments(spec.problem_class),
    ),
}


def _small(spec: KernelSpec) -> tuple[Any, tuple]:
    from . import argument_types

    place, arguments = _SMALL[spec.kind]
    module, name = place.split(":")
    kernel = getattr(import_module(f"..kernels.small.{module}", __package__), name)
    return kernel(spec.config, spec.problem_class), arguments(argument_types, spec)


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
BUILDERS = dict.fromkeys(_SMALL, _small) | {kind: _own(kind) for kind in sorted(kinds())}
assert BUILDERS.keys() == KINDS
