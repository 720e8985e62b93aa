"""Shared by the adapters to serving engines: options that engines pass, and kernels that their
calls can take.

An engine's function has many arguments of other kernels. The table of its module (`Library`) names
each of them. An argument that is in no table is a TypeError, so that nothing that an engine begins
to pass is overlooked.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from .. import metadata
from ..compat.arguments import HONOURED, Library
from ..kernels.functions.user_functions import ALIBI
from ..kernels.problem_class import (
    KV_DESCALES,
    KV_DTYPES,
    OF_SEQUENCES,
    Q_DESCALE,
    FunctionClass,
    ProblemClass,
)
from ..models import AttentionModel
from ..run.ahead.needs import Needs
from ..run.catalogue import KernelSpec
from ..warm import kernels_of, load

#: An engine's own plan has this name, too.
METADATA = "scheduler_metadata"
_SLOPES = FunctionClass(ALIBI, ("float32 1",))


def our_options(
    library: Library, function: str, options: dict[str, Any], q: torch.Tensor, k: torch.Tensor
) -> dict[str, Any]:
    """Return honoured options under our names, without plans, and scales only of float8. Raises as
    `Library.refuse`."""
    library.refuse(function, options)
    dropped: set[str] = set()
    for tensor, names in ((q, (Q_DESCALE,)), (k, KV_DESCALES)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in KV_DTYPES:
            dropped.update(names)
    if not metadata.is_ours(options.get(METADATA)):
        dropped.add(METADATA)
    return {
        library.arguments[name].ours or name: value
        for name, value in options.items()
        if library.arguments[name].fate == HONOURED and name not in dropped
    }


def engine_kernels(model: AttentionModel, needs: Needs, device: torch.device) -> list[KernelSpec]:
    """Return the kernels of `warm_up` without those of calls that no engine makes: engines write
    rows of their caches themselves, scales are those of sequences, slopes those of heads."""
    return [spec for spec in kernels_of(model, needs, device) if _is_taken(spec, needs)]


def load_and_log(specs: list[KernelSpec], device: torch.device, of: str = "") -> None:
    """Compile and load kernels, and log how long that took. of: what they are of, in the log."""
    made = load(specs, device)
    logging.getLogger("fa4_hd256").info(
        "%d kernels%s, %d of them compiled, in %.1f s",
        made.kernels,
        of,
        made.compiled,
        made.seconds,
    )


def _is_taken(spec: KernelSpec, needs: Needs) -> bool:
    found = spec.problem_class
    if spec.kind == "append_rows":
        return False
    if not isinstance(found, ProblemClass):
        return True
    scales = OF_SEQUENCES if found.kv_dtype is not None else ""
    slopes = _SLOPES if needs.alibi else None
    splits = not found.split or found.fixed_parts == needs.batch_invariant
    return found.descale == scales and found.score_mod == slopes and splits
