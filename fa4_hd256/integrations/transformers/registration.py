"""Registration of this attention with transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..given_results import check_ds_bytes
from .layers import BATCHING_NAME, NAME, attention, batched_attention
from .masks import mask

#: Supported versions of transformers: the first, and the first that is too new.
VERSIONS = ((5, 20), (6, 0))


def register(name: str = NAME, *, ds_bytes: int | None = None) -> str:
    """Make this attention available to transformers models as `attn_implementation=name`.

    ds_bytes: most bytes of dS at a time in a backward, as in `BackwardConfig`; None: the value of
    FA4_HD256_DS_BYTES, or the default.

    Returns name. Raises ImportError if transformers is missing or its version is not supported,
    ValueError for a name that transformers would take for flash-attn and for ds_bytes below 0,
    TypeError if ds_bytes is no int.
    """
    check_ds_bytes(ds_bytes)
    check_version()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if "flash" in name:
        raise ValueError(
            f"name is {name!r}; accepted: a name without 'flash', which transformers takes for a "
            "release of flash-attn"
        )
    bounded = attention if ds_bytes is None else functools.partial(attention, ds_bytes=ds_bytes)
    AttentionInterface.register(name, bounded)
    AttentionMaskInterface.register(name, mask)
    return name


def use_in_continuous_batching(model: Any) -> str:
    """Make this the attention of `model` for continuous batching (`model.generate_batch`) alone.

    The name, `BATCHING_NAME`, is returned, and written into the model's configuration: under a name
    with "flash" `set_attn_implementation` looks for a release of flash-attn. Under this name
    transformers builds no masks, which continuous batching does not need. `batched_attention`
    refuses any other use of the model, until `model.set_attn_implementation` chooses another name.

    Raises ImportError as `register` does.
    """
    check_version()
    from transformers import AttentionInterface

    AttentionInterface.register(BATCHING_NAME, batched_attention)
    model.config._attn_implementation = BATCHING_NAME
    return BATCHING_NAME


def check_version() -> None:
    """Raise ImportError unless transformers is installed and has the interface used here."""
    low, high = (".".join(map(str, version)) for version in VERSIONS)
    wanted = f"fa4_hd256 needs transformers >={low},<{high}"
    try:
        import transformers
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        advice = f"pip install 'transformers>={low},<{high}'"
        raise ImportError(f"{wanted}: {error}; {advice}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise ImportError(f"{wanted}; transformers {transformers.__version__} is installed")
    missing = {*_positional(mask)} - {*_positional(sdpa_mask)}
    if missing:
        raise ImportError(
            f"{wanted}; the mask functions of transformers {transformers.__version__} do not take "
            f"{', '.join(sorted(missing))}"
        )


def _positional(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
