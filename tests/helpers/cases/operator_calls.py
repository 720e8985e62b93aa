"""Arguments of the torch operators for tests that call these themselves, by name."""

from __future__ import annotations

from typing import Any

from fa4_hd256.call.operator_arguments import (
    BackwardTensors,
    BackwardValues,
    CacheTensors,
    CacheValues,
    ForwardTensors,
    ForwardValues,
)
from fa4_hd256.call.options import UNBOUNDED

#: Values of a call of dense sequences without a mask, on the static scheduler, without KV splits.
_PLAIN: dict[str, Any] = {
    **ForwardValues(0.0625, UNBOUNDED, UNBOUNDED)._asdict(),
    "wanted": [True, True, False, False],
    "rotary_interleaved": True,
}


def forward_arguments(q: Any, k: Any, v: Any, **others: Any) -> tuple[Any, ...]:
    """Return the arguments of `fa4_hd256::forward`, in order. others: fields of ForwardTensors and
    ForwardValues that are not as `_PLAIN` has them."""
    return _arguments(ForwardTensors, ForwardValues, {"q": q, "k": k, "v": v, **others})


def backward_arguments(**others: Any) -> tuple[Any, ...]:
    """Return the arguments of `fa4_hd256::backward`, in order."""
    return _arguments(BackwardTensors, BackwardValues, {"dlse": None, **others})


def kvcache_arguments(*given: Any, **others: Any) -> tuple[Any, ...]:
    """Return the arguments of `fa4_hd256::forward_kvcache`, in order. given: out, the caches, q, k
    and v."""
    named = dict(zip(CacheTensors._fields, given))
    return _arguments(CacheTensors, CacheValues, named | others)


def _arguments(tensors: Any, values: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    own = {name: given.pop(name) for name in tensors._fields if name in given}
    last = [name for name in ("wanted", "rotary_interleaved") if name in values._fields]
    fields = *ForwardValues._fields, *last
    plain = [given.pop(name, _PLAIN[name]) for name in fields]
    assert not given, f"no arguments of the operator: {sorted(given)}"
    return *tensors(**own), *plain
