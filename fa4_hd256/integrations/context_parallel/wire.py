"""The group of gloo by which calls over a user's group talk, and how a rank that fails inside a
call makes that an error on the others.

NOTE [a failed rank].  Ranks of gloo wait on their connections. One that raises closes its own,
having written why into the group's store: who waits for it, or will, has an error at once, raises
and closes its own, so that it goes round among ranks that do not exchange with the first one. All
of that happens where something has failed; a call that succeeds has no message and no wait for it.

The group is ours alone, so that the user's stays whole, and is made again for no one: a rank that
had done its part hears of the failure a call later than others, so that no message after it would
be known to belong to the same call on all.

Over NCCL the host waits for nobody, and its next call hears of the failure. A GPU that waits for
the other's rows before that is let go by NCCL's own watchdog: to abort NCCL's group would let it
go on with what has not arrived, and tell nobody.
"""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Wire", "wire_of"]

#: In the group's store: why it is closed.
_CAUSE = "fa4_hd256_failed"
#: Tag of messages that nobody sends.
_NEVER_SENT = 0x7EAD
#: Letters of a cause, which may quote others.
_LONGEST = 2000

_wires: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()


def wire_of(group: Any) -> Wire:
    """Return the wire of a user's group; all ranks call this at the same point of their first
    call."""
    if group not in _wires:
        _wires[group] = wire = Wire(group)
        release = weakref.finalize(group, _destroy, wire.group)
        release.atexit = False
    return _wires[group]


class Wire:
    """A group of gloo of the same ranks in the same order, until it is closed."""

    def __init__(self, group: Any) -> None:
        """group: the user's, whose timeout it has."""
        self._ranks = dist.get_process_group_ranks(group)
        if dist.get_backend(group) == "gloo":
            # Each with each: one that has ended is an error here, where it were waited for below.
            hello = torch.zeros(len(self._ranks), dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(hello), hello, group=group)
        is_sorted = self._ranks == sorted(self._ranks)
        in_order: dict[str, Any] = {} if is_sorted else {"sort_ranks": False}
        self.group: Any = dist.new_group(
            self._ranks,
            backend="gloo",
            timeout=_timeout(group),
            use_local_synchronization=True,
            **in_order,
        )
        self._cause = ""

    def check(self) -> None:
        """Raises RuntimeError where it is closed."""
        if self._cause:
            raise RuntimeError(
                f"this group takes no more calls over ranks, since one has failed: {self._cause}. "
                "Make a new group by torch.distributed.new_group"
            )

    def heard_cause(self) -> str:
        """Return why another rank has closed it, where it has said so; for errors alone."""
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            if store.check([_CAUSE]):
                return store.get(_CAUSE).decode(errors="replace")
        return ""

    def close(self, error: BaseException) -> None:
        """Close the group for a rank that raises inside a call: NOTE [a failed rank]."""
        if self._cause or len(self._ranks) == 1:
            return
        own = dist.get_rank(self.group)
        self._cause = f"rank {own} raised {type(error).__name__}: {error}"[:_LONGEST]
        # The first one's stays. A store may be gone with the rank that served it.
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            self._cause = store.compare_set(_CAUSE, "", self._cause).decode(errors="replace")
        # gloo closes all connections of a group where one of its receives has waited for too long;
        # one that is broken already fails at once, and closes no others.
        for rank in (*self._ranks[:own], *self._ranks[own + 1 :]):
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(nothing, rank, self.group, _NEVER_SENT)
                work.wait(timedelta(milliseconds=1))


def _timeout(group: Any) -> timedelta | None:
    """A group's own; None, PyTorch's, where it has several backends, or does not say."""
    kinds = {"gloo": "cpu", "nccl": "cuda"}
    kind = kinds.get(dist.get_backend(group))
    if kind is None:
        return None
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    return getattr(options, "_timeout", None)


def _destroy(group: Any) -> None:
    # The group may be gone with all groups.
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)
