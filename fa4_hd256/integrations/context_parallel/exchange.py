"""Exchange between ranks: checks of their calls, and rows of tensors.

Every function here is collective: all ranks of the group call it, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .control_group import ControlGroup, control_group_of

__all__ = ["Ranks", "Transfer", "explaining_transport_errors"]

Checked = TypeVar("Checked")

#: Gathers into one tensor, in the order of ranks; PyTorch before 2.13 has it under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes of a rank's message about its call, behind a byte that says whether it is accepted: a
#: digest of the text, and the text.
_DIGEST, _SAID = 32, 768


class Transfer:
    """Sends and receives that have been started."""

    def __init__(self, works: Sequence[Any] = (), kept: Sequence[torch.Tensor] = ()) -> None:
        # The tensors must live until they are sent.
        self._works, self._kept = works, kept

    def wait(self) -> None:
        """Make the current stream wait for the transfer; on the CPU the caller waits."""
        for work in self._works:
            work.wait()
        self._kept = ()


class Ranks:
    """The ranks of a group. own: this process's number in it; count: how many there are."""

    def __init__(self, group: Any) -> None:
        """group: None for all ranks.

        Raises RuntimeError if torch.distributed is not initialised, or this process is not in the
        group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "attention over ranks needs torch.distributed, which is not initialised; call "
                "torch.distributed.init_process_group first"
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.own, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.own < 0:
            raise RuntimeError("this process is not in the group; pass a group that has it")

    @property
    def control(self) -> ControlGroup:
        """The group of gloo for messages; the first call makes it."""
        return control_group_of(self.group)

    @property
    def _moves(self) -> Any:
        """Return the group that moves tensors."""
        return self.control.group if dist.get_backend(self.group) == "gloo" else self.group

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Turn an error that this rank raises in the block into an error on all ranks.

        The other ranks raise RuntimeError with the first rank's error, in this call and in every
        later one.
        """
        with explaining_transport_errors(self.own, self.count):
            control = self.control
        control.check()
        try:
            with explaining_transport_errors(self.own, self.count, control.cause_of_failure):
                yield
        except BaseException as error:
            control.close(error)
            raise

    def agree(self, check: Callable[[], tuple[str, Checked]]) -> Checked:
        """Check this rank's call, and that all ranks' calls agree.

        check: returns a text that must be equal on all ranks, and the result of this method; raises
        for arguments that are not accepted.

        Raises what `check` raises, and on all other ranks RuntimeError with that message. Raises
        ValueError on all ranks if the texts differ.
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
        """Return the messages of all ranks. No GPU is waited for."""
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with self.failing_together():
            dist.all_gather(found, own, group=self.control.group)
        return [bytes(tensor.tolist()) for tensor in found]

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Start to send contiguous tensors to ranks, and to receive others. Between two ranks the
        order of the arguments counts."""
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
        """Return (ranks, ...): the tensors of all ranks."""
        found = own.new_empty((self.count, *own.shape))
        _all_gather(found.flatten(0, 1), own.contiguous(), group=self._moves)
        return found

    def exchange(self, given: torch.Tensor) -> torch.Tensor:
        """Return (ranks, ...): the tensor that each rank sends to this one. given: (ranks, ...), a
        tensor for each rank."""
        found = torch.empty_like(given, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, given.contiguous(), group=self._moves)
        return found


@contextlib.contextmanager
def explaining_transport_errors(
    own: int, count: int, cause: Callable[[], str] = str
) -> Iterator[None]:
    """Explain an error that the transport raises in the block: another rank has failed in its call,
    has ended, or is late. Other errors, such as that of a tensor's dtype, pass unchanged.

    NCCL raises nothing here; its watchdog reports the error later.

    cause: returns what the first failed rank has reported, or "".
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_transport_error(error):
            raise
        why = cause()
        raise RuntimeError(
            f"another rank has failed in a call over ranks of this one's group: {why}"
            if why
            else f"rank {own} of {count} heard nothing of another rank, which has ended, or did "
            f"not call in time: {error}"
        ) from error


def _is_transport_error(error: RuntimeError) -> bool:
    """Return True if other ranks caused the error, and not the call itself. gloo's errors have no
    type of their own; their text begins with a file of gloo's source."""
    if isinstance(error, dist.DistError):
        return "ncclInvalid" not in str(error)
    return re.search(r"gloo[/\\]transport", str(error)) is not None
