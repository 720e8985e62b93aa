"""Options that serving engines pass beside tensors and lengths: honoured, without effect, or
refused.

An engine's function has many arguments of other kernels. Each is in one of three tables of its
module; one in none of them is a TypeError, so that nothing that an engine begins to pass is
overlooked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import metadata
from ..kernels.problem_class import DESCALES, KV_DTYPES

__all__ = ["METADATA", "EngineOptions", "scaled_alone"]

#: An engine's own plan has this name, too.
METADATA = "scheduler_metadata"


@dataclass(frozen=True)
class EngineOptions:
    """The tables of one function of an engine.

    function: its name, for errors. honoured: name -> that of the same in `flash_attn_varlen_func`
    and `flash_attn_with_kvcache`. unused: name -> why any value gives the same result. neutral:
    name -> (values that request nothing, what others request), the first of them the default.
    """

    function: str
    honoured: dict[str, str]
    unused: dict[str, str]
    neutral: dict[str, tuple[tuple[Any, ...], str]]

    def translated(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the honoured options under our names; another kernel's plan is dropped.

        Raises TypeError for a name in no table, and NotImplementedError for one that requests what
        is not offered.
        """
        for name, value in given.items():
            if name in self.neutral:
                values, what = self.neutral[name]
                if not any(value is one or _equal(value, one) for one in values):
                    shown = " or ".join(map(repr, values))
                    raise NotImplementedError(
                        f"{name} is given; accepted by {self.function}: {shown}. Not offered: "
                        f"{what}"
                    )
            elif name not in self.honoured and name not in self.unused:
                raise TypeError(f"{self.function} got an unexpected argument {name!r}")
        return {
            ours: given[name]
            for name, ours in self.honoured.items()
            if name in given and (name != METADATA or metadata.is_ours(given[name]))
        }


def _equal(value: Any, one: Any) -> bool:
    """Compare numbers alone: comparing tensors may wait for the device."""
    plain = (bool, int, float)
    return isinstance(value, plain) and isinstance(one, plain) and value == one


def scaled_alone(options: dict[str, Any], k: torch.Tensor) -> dict[str, Any]:
    """Return the options without the scales of k and v, which engines always pass, where k has
    none."""
    if isinstance(k, torch.Tensor) and k.dtype in KV_DTYPES:
        return options
    return {name: value for name, value in options.items() if name not in DESCALES}
