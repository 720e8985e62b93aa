"""Kernels of a model compiled before its first call: `warm_up`, and the command `build`."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .gpus.devices import gpu_of
from .gpus.family import architecture_of
from .models import AttentionModel, Mask, model_named
from .run.ahead.build import TARGETS, build, unique
from .run.ahead.needs import FLAGS, Needs, specs_of
from .run.ahead.options import OF_Q
from .run.ahead.processes import compiling_beside, in_own_order
from .run.catalogue import KernelSpec
from .run.compile import compile_kernel
from .run.kernel_names import kernel_named
from .run.launch import prepare
from .words import shown

_E4M3 = {"float8_e4m3fn": torch.float8_e4m3fn}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, **_E4M3}
_KV_DTYPES = {OF_Q: None, **_E4M3, "uint8": torch.uint8}
_USUAL = Needs()


@dataclass(frozen=True)
class WarmUp:
    """Result of `warm_up`. kernels: loaded; compiled: of them; seconds: what it took."""

    kernels: int
    compiled: int
    seconds: float


def warm_up(
    model: str | AttentionModel,
    needs: Needs = _USUAL,
    *,
    tensor_parallel: int = 1,
    device: torch.device | str | None = None,
) -> WarmUp:
    """Compile and load every kernel that calls of a model take, of any batch and any lengths: no
    such call compiles anything afterwards, and a CUDA graph can be captured at the first.

    model: a name in `fa4_hd256.models.MODELS`, or an `AttentionModel`: heads, masks of its layers,
    softcap, sink.
    needs: what its calls are like; by default prefill and decode in bf16, of dense and of packed
    sequences and with seqused_k alone (docs/features.md has the forms that libraries' calls
    take).
    tensor_parallel: ranks over which the heads are divided. device: whose GPU runs the calls, None
    for the current one, or for the simulator where there is none.

    Several processes compile, one for each core unless FA4_HD256_JOBS says how many. Ranks of
    torch.distributed that start together share the work: each kernel is compiled once
    (docs/serving.md).

    Raises TypeError and ValueError for what is not accepted, and as calls do where kernels cannot
    be compiled.
    """
    if not isinstance(needs, Needs):
        raise TypeError(f"needs must be fa4_hd256.Needs, got {type(needs).__name__}")
    place = _device(device)
    return load(kernels_of(_model(model).sharded(tensor_parallel), needs, place), place)


def kernels_of(model: AttentionModel, needs: Needs, place: torch.device) -> list[KernelSpec]:
    return specs_of(model, needs, architecture_of(place), gpu_of(place).tuning_name)


def load(specs: list[KernelSpec], place: torch.device) -> WarmUp:
    begin = time.perf_counter()
    with compiling_beside(specs) as missing:
        for spec in in_own_order(specs):
            prepare(compile_kernel(spec), place)
    return WarmUp(len(specs), missing, time.perf_counter() - begin)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device is {shown(device)}; accepted: a torch.device or the name of one"
            ) from error
        there = torch.cuda.device_count()
        if place.type == "cuda" and (place.index or 0) >= there:
            raise ValueError(f"device is {shown(device)}; accepted: one of the {there} GPUs here")
        return place
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _model(model: str | AttentionModel) -> AttentionModel:
    if isinstance(model, AttentionModel):
        return model
    if not isinstance(model, str):
        raise TypeError(f"model must be a name or an AttentionModel, got {type(model).__name__}")
    return model_named(model)


# ---------------------------------------------------------------- python -m fa4_hd256 build


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ValueError for what is not accepted."""
    models = [model_named(name) for name in arguments.model]
    if arguments.heads:
        models.append(_given_model(arguments))
    else:
        _refuse_alone(arguments)
    named = [kernel_named(text) for text in arguments.kernel]
    if not models and not named:
        raise ValueError("nothing to build; accepted: --model, --heads or --kernel")
    needs = _needs(arguments)
    models = [model.sharded(arguments.tensor_parallel) for model in models]
    specs = {name: _of_target(name, models, needs, named) for name in arguments.arch}
    made = build(specs, arguments.out, arguments.jobs)
    place = shlex.quote(str(made.directory))
    print(
        f"{made.added} kernels built, {made.kernels} in {place}, "
        f"{made.nbytes / 1e6:.1f} MB; use them by FA4_HD256_PREBUILT={place} or "
        "fa4_hd256.use_prebuilt"
    )
    return 0


def _needs(arguments: argparse.Namespace) -> Needs:
    also = {name: getattr(arguments, name) for name in FLAGS}
    use_clc = {"static": False, "dynamic": True, "both": None}[arguments.scheduler]
    return Needs(
        arguments.use or Needs.uses,
        arguments.form or Needs.forms,
        [_DTYPES[name] for name in arguments.dtype or ("bfloat16",)],
        use_clc,
        page_sizes=arguments.page_size,
        kv_dtypes=[_KV_DTYPES[name] for name in arguments.kv_dtype or (OF_Q,)],
        **also,
    )


def _of_target(
    name: str, models: Sequence[AttentionModel], needs: Needs, named: Sequence[KernelSpec]
) -> list[KernelSpec]:
    target = TARGETS[name]
    architecture = target.architecture
    found = [spec for spec in named if spec.architecture is architecture]
    for model in models:
        found += specs_of(model, needs, architecture, target.gpu)
    if not found:
        raise ValueError(f"--arch {name}: none of the kernels given is {architecture.name}'s")
    return unique(found)


def _refuse_alone(arguments: argparse.Namespace) -> None:
    own = ("full", "window", "softcap", "sink")
    given = [
        f"--{name}"
        for name in own
        if getattr(arguments, name) not in (None, []) and getattr(arguments, name) is not False
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} without --heads; accepted: with --heads Q/KV, whose attention "
            "that describes"
        )


def _given_model(arguments: argparse.Namespace) -> AttentionModel:
    heads = arguments.heads.split("/")
    if len(heads) != 2 or not all(part.isdecimal() and int(part) for part in heads):
        raise ValueError(f"--heads is {arguments.heads!r}; accepted: Q/KV, 16/2 for instance")
    masks = [Mask(not arguments.full)]
    for keys in arguments.window:
        if keys < 1:
            raise ValueError(f"--window is {keys}; accepted: 1 or more keys")
        masks.append(Mask(not arguments.full, (keys - 1, keys - 1 if arguments.full else None)))
    return AttentionModel(
        arguments.heads,
        int(heads[0]),
        int(heads[1]),
        tuple(masks),
        0.0 if arguments.softcap is None else arguments.softcap,
        sink=arguments.sink,
    )
