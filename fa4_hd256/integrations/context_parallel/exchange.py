"""Exchange between ranks: what they were called with, and rows of tensors.

Everything that one rank does here all ranks of the group do, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .wire import Wire, wire_of

__all__ = ["Ranks", "Transfer", "heard"]

Checked = TypeVar("Checked")

#: Into one tensor, rank after rank; before PyTorch 2.13 under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes of what a rank says of its call: whether it is accepted, a digest, a text.
_DIGEST, _SAID = 32, 768


class Transfer:
    """Sends and receives under way."""

    def __init__(self, works: Sequence[Any] = (), kept: Sequence[torch.Tensor] = ()) -> None:
        # Kept until they are sent.
        self._works, self._kept = works, kept

    def wait(self) -> None:
        """The current stream, on the CPU the caller, waits for them."""
        for work in self._works:
            work.wait()
        self._kept = ()


class Ranks:
    """The ranks of a group, by their number in it."""

    def __init__(self, group: Any) -> None:
        """group: None for that of all ranks. Raises RuntimeError without torch.distributed being
        initialised, or in a process that is none of the group's."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "attention over ranks needs torch.distributed, which is not initialised; call "
                "torch.distributed.init_process_group first"
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.own, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.own < 0:
            raise RuntimeError("this process is none of the group's ranks; give one it belongs to")

    @property
    def wire(self) -> Wire:
        """Made by the first call."""
        return wire_of(self.group)

    @property
    def _moves(self) -> Any:
        """The group that moves rows."""
        return self.wire.group if dist.get_backend(self.group) == "gloo" else self.group

    @contextlib.contextmanager
    def in_common(self) -> Iterator[None]:
        """Turn an error that this rank raises inside into an error on all ranks.

        Raises RuntimeError with what the first one has raised on the others, and where that has
        been before.
        """
        with heard(self.own, self.count):
            wire = self.wire
        wire.check()
        try:
            with heard(self.own, self.count, wire.heard_cause):
                yield
        except BaseException as error:
            wire.close(error)
            raise

    def agree(self, check: Callable[[], tuple[str, Checked]]) -> Checked:
        """Check this rank's call, and that all ranks' are the same. check: what a call must have in
        common, as a text, and what is returned here; raises what is not accepted.

        Raises what check does, and on all other ranks RuntimeError with that text; ValueError on
        all ranks where their texts differ.
        """
        found: Checked | Exception
        try:
            (text, found), accepted = check(), b"\1"
        except Exception as error:
            found = error
            text, accepted = f"{type(error).__name__}: {error}", b"\0"
        said = accepted + hashlib.sha256(text.encode()).digest() + text.encode()
        said = said[: 1 + _DIGEST + _SAID].ljust(1 + _DIGEST + _SAID, b"\0")
        all_said = self._all(said)
        if isinstance(found, Exception):
            raise found
        texts = [s[1 + _DIGEST :].rstrip(b"\0").decode(errors="replace") for s in all_said]
        for rank, other in enumerate(all_said):
            if other[:1] == b"\0":
                raise RuntimeError(f"rank {rank} of the group refused its call: {texts[rank]}")
        own = all_said[self.own]
        for rank, other in enumerate(all_said):
            if other[: 1 + _DIGEST] != own[: 1 + _DIGEST]:
                raise ValueError(
                    "the ranks' calls differ; accepted: the same sizes, types and options on all. "
                    f"Rank {self.own}: {texts[self.own]}. Rank {rank}: {texts[rank]}"
                )
        return found

    def _all(self, said: bytes) -> list[bytes]:
        """Return what all ranks say; nothing waits for a GPU."""
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with self.in_common():
            dist.all_gather(found, own, group=self.wire.group)
        return [bytes(tensor.tolist()) for tensor in found]

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Begin to send contiguous tensors to ranks, and to receive others; between two ranks in
        the order in which they are given."""
        group = self._moves
        operations = [
            dist.P2POp(function, tensor, dist.get_global_rank(group, rank), group)
            for function, given in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in given
        ]
        if not operations:
            return Transfer()
        works = dist.batch_isend_irecv(operations)
        return Transfer(works, [operation.tensor for operation in operations])

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return (ranks, ...) of every rank's tensor."""
        found = own.new_empty((self.count, *own.shape))
        _all_gather(found.flatten(0, 1), own.contiguous(), group=self._moves)
        return found

    def exchange(self, given: torch.Tensor) -> torch.Tensor:
        """Return (ranks, ...), rank by rank what it has for this one; given: likewise for the
        others."""
        found = torch.empty_like(given, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, given.contiguous(), group=self._moves)
        return found


@contextlib.contextmanager
def heard(own: int, count: int, cause: Callable[[], str] = str) -> Iterator[None]:
    """Explain an error of the transport's inside: another rank has failed in its call, has ended,
    or is late. NCCL reports it later, by its watchdog. Other errors, of a tensor's type for one,
    pass unchanged.

    cause: what the first rank that failed has told, empty where none has.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_of_transport(error):
            raise
        why = cause()
        raise RuntimeError(
            f"another rank has failed in a call over ranks of this one's group: {why}"
            if why
            else f"rank {own} of {count} heard nothing of another rank, which has ended, or did "
            f"not call in time: {error}"
        ) from error


def _is_of_transport(error: RuntimeError) -> bool:
    """Return True if the other ranks are the reason, and not the call. gloo's errors have no type
    of their own, but begin with the file in its source."""
    if isinstance(error, dist.DistError):
        return "ncclInvalid" not in str(error)
    return re.search(r"gloo[/\\]transport", str(error)) is not None
