"""Options that serving engines pass beside tensors and lengths.

An engine's function has many arguments of other kernels. The table of its module (`Library`) names
each of them. An argument that is in no table is a TypeError, so that nothing that an engine begins
to pass is overlooked.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import metadata
from ..compat.arguments import HONOURED, Library
from ..kernels.problem_class import KV_DESCALES, KV_DTYPES, Q_DESCALE

#: An engine's own plan has this name, too.
METADATA = "scheduler_metadata"


def our_options(
    library: Library, function: str, options: dict[str, Any], q: torch.Tensor, k: torch.Tensor
) -> dict[str, Any]:
    """Return the honoured options under our names.

    Another kernel's plan is dropped, and so are scales of tensors that are not in float8, which
    engines pass always. Raises as `Library.refuse` does.
    """
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
