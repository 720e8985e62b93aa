"""A gloo group beside each user's group, for messages, and to make one rank's failure known.

NOTE [a failed rank].  A rank that raises inside a call writes the reason into the group's store,
then closes its connections.  A rank that waits for it, now or later, gets an error at once, raises,
and closes its connections, too.  So the error also reaches ranks that exchange nothing with the
first one.  A call that succeeds sends no message for this and waits for nothing.

The group belongs to this package, so the user's group stays usable.  It is not made again after a
failure: a rank that had done its part learns of the failure one call later than others, and
messages of a new group could not be matched to calls.

Over NCCL the host does not wait; its next call learns of the failure.  A GPU that waits for rows of
a failed rank is released by NCCL's watchdog.  The NCCL group is not aborted here: the GPU would
then go on with rows that have not arrived, and nothing would report it.
"""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

#: Key in the group's store, of the reason why it is closed.
_CAUSE = "fa4_hd256_failed"
#: Tag of messages that nobody sends.
_NEVER_SENT = 0x7EAD
#: Characters of a reason, which may quote other ranks' reasons.
_LONGEST = 2000

_control_groups: weakref.WeakKeyDictionary[Any, ControlGroup] = weakref.WeakKeyDictionary()


def control_group_of(group: Any) -> ControlGroup:
    """Return the control group of a user's group. Collective at the first call."""
    if group not in _control_groups:
        _control_groups[group] = control = ControlGroup(group)
        release = weakref.finalize(group, _destroy, control.group)
        release.atexit = False
    return _control_groups[group]


class ControlGroup:
    def __init__(self, group: Any) -> None:
        """group: the user's; its timeout is taken over."""
        self._ranks = dist.get_process_group_ranks(group)
        if dist.get_backend(group) == "gloo":
            # Connects all pairs: a rank that has ended is an error here, not a timeout below.
            hello = torch.zeros(len(self._ranks), dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(hello), hello, group=group)
        is_sorted = self._ranks == sorted(self._ranks)
        unsorted: dict[str, Any] = {} if is_sorted else {"sort_ranks": False}
        self.group: Any = dist.new_group(
            self._ranks,
            backend="gloo",
            timeout=_timeout(group),
            use_local_synchronization=True,
            **unsorted,
        )
        self._cause = ""

    def check(self) -> None:
        if self._cause:
            raise RuntimeError(
                f"this group takes no more calls over ranks, since one has failed: {self._cause}. "
                "Make a new group by torch.distributed.new_group"
            )

    def cause_of_failure(self) -> str:
        """Return the reason that a failed rank has written, or "". Called after an error only."""
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            if store.check([_CAUSE]):
                return store.get(_CAUSE).decode(errors="replace")
        return ""

    def close(self, error: BaseException) -> None:
        """Close the group because this rank has raised: NOTE [a failed rank]."""
        if self._cause or len(self._ranks) == 1:
            return
        local = dist.get_rank(self.group)
        self._cause = f"rank {local} raised {type(error).__name__}: {error}"[:_LONGEST]
        # The first reason stays. The store may be gone, with the rank that served it.
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            self._cause = store.compare_set(_CAUSE, "", self._cause).decode(errors="replace")
        # gloo closes all connections of a group when a receive times out. A receive over a broken
        # connection fails at once instead and closes nothing, so every rank is tried.
        for rank in (*self._ranks[:local], *self._ranks[local + 1 :]):
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(nothing, rank, self.group, _NEVER_SENT)
                work.wait(timedelta(milliseconds=1))


def _timeout(group: Any) -> timedelta | None:
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
