"""Kernels that calls of a serving engine can take."""

from __future__ import annotations

import torch

from ..kernels.functions.kernel_functions import ALIBI
from ..kernels.functions.user_functions import FunctionClass
from ..kernels.problem_class import OF_SEQUENCES, ProblemClass
from ..models import AttentionModel
from ..run.ahead.needs import Needs
from ..run.catalogue import KernelSpec
from ..warm import kernels_of

_SLOPES = FunctionClass(ALIBI, ("float32 1",))


def engine_kernels(model: AttentionModel, needs: Needs, device: torch.device) -> list[KernelSpec]:
    """Return the kernels of `warm_up` without those of calls that no engine makes: engines write
    rows of their caches themselves, scales are those of sequences, slopes those of heads."""
    return [spec for spec in kernels_of(model, needs, device) if _is_taken(spec, needs)]


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
