"""The plan of a backward in mxfp8: `backward` with the operands of `call.mxfp8_gradients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import environment
from ..call import named_configs
from ..call.chunks import BackwardDivision, divide
from ..call.memory import View
from ..call.mxfp8_gradients import CODES, SCALES, Mxfp8BackwardTensors, check_division, described
from ..call.operator_arguments import ForwardValues
from ..call.options import Options
from ..gpus.devices import Gpu, gpu_of
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from ..kernels.problem_class import OF_BLOCKS
from .backward import STATS, Wanted, add_gradients, add_preprocess, memory_of, results_of
from .backward_arguments import PreprocessTensors
from .plan import LaunchPlan, PlanBuilder

#: Gradients of q, k and v, always all: none of these kernels makes a single one.
WANTED = Wanted()


def config_of(name: str, device: Any) -> Any:
    kind = kernels_of(architecture_of(device)).config("mxfp8_backward")
    config = named_configs.decode(name, kind)
    ds_bytes = environment.ds_bytes()
    if name == named_configs.DEFAULT and ds_bytes:
        config = replace(config, ds_bytes=ds_bytes)
    return config


def plan_call(given: Sequence[Any], values: ForwardValues) -> LaunchPlan:
    """Return the plan, whose results are (dq, dk, dv). given: the fields of
    `Mxfp8BackwardTensors`, packed sequences without a batch. values: of the forward, with the
    backward's scheduler and configuration. Raises as `described` and `check_division` do."""
    tensors = Mxfp8BackwardTensors(*given)
    batched = tensors.with_batches()
    device = batched.out.device
    config, gpu = config_of(values.config, device), gpu_of(device)
    problem = described(
        batched, Options.of_operator(values, (None, None)),
        (values.max_seqlen_q, values.max_seqlen_k),
    )  # fmt: skip
    builder = PlanBuilder.for_tensors(device, Mxfp8BackwardTensors._fields, tensors)
    has_batch = dict.fromkeys("qkv", tensors.q.ndim == batched.q.ndim)
    if not problem.ds_bytes:
        # No query sees a key.
        shapes = problem.forward.q_shape, problem.k_shape, problem.k_shape
        dtype = problem.forward.dtype
        zeros = [
            builder.result(name, shape, dtype, 0.0, has_batch[name[1]])
            for name, shape in zip(("dq", "dk", "dv"), shapes, strict=True)
        ]
        return builder.plan(*zeros)
    division = divide(problem, config.ds_bytes, gpu)
    check_division(division)
    named = batched._asdict().items()
    views = {name: View.of(name, tensor) for name, tensor in named if tensor is not None}
    made = add_division(builder, division, has_batch, views, config, gpu)
    return builder.plan(*results_of(builder, WANTED, made, views)[:3])


def add_division(
    builder: PlanBuilder,
    division: BackwardDivision,
    has_batch: Mapping[str, bool],
    views: Mapping[str, View],
    config: Any,
    gpu: Gpu,
) -> dict[str, View]:
    """Add the launches of a divided backward; return what they write, by name. has_batch: as
    of `backward.add_division`. views: of `Mxfp8BackwardTensors`, packed sequences with a batch
    of 1."""
    problem = division.problem
    made = memory_of(builder, division, WANTED, has_batch)
    if not problem.has_no_queries:
        rows = PreprocessTensors(
            builder.operand(views["out"]),
            builder.operand(views["dout"]),
            builder.rows(views["lse"]),
            builder.rows(views["dlse"]) if "dlse" in views else None,
            made[STATS],
            tuple(views[name] for name in problem.preprocess_class.ragged),
        )
        add_preprocess(builder, problem, rows)
    if not problem.has_no_queries and not problem.has_no_keys:
        # Bytes in twos: CuTe DSL takes no tensor of single ones from PyTorch.
        dtype = problem.forward.dtype
        operands = {name: builder.operand(views[name]).view(dtype) for name in CODES}
        operands |= {name: builder.scale(views[name], OF_BLOCKS) for name in SCALES}
        add_gradients(builder, division, config, gpu, operands, views, made)
    return made
