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

Checked = TypeVar("Checked")

#: Gathers into one tensor, in the order of ranks; PyTorch before 2.13 has it under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes of a rank's message about its call: after a byte for "accepted", a digest of the text, and
#: the text.
_DIGEST, _TEXT = 32, 768


class Transfer:
    def __init__(self, works: Sequence[Any] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        # The tensors must live until they are sent.
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Make the current stream wait for the transfer; on the CPU the caller waits."""
        for work in self._works:
            work.wait()
        self._tensors = ()


class Ranks:
    """Ranks of a group. rank: this process's; count: of all ranks."""

    def __init__(self, group: Any) -> None:
        """group: None for all ranks. Raises RuntimeError if torch.distributed is not initialised,
        or this process is not in the group."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "attention over ranks needs torch.distributed, which is not initialised; call "
                "torch.distributed.init_process_group first"
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise RuntimeError("this process is not in the group; pass a group that has it")

    @property
    def control(self) -> ControlGroup:
        return control_group_of(self.group)

    @property
    def _moves(self) -> Any:
        return self.control.group if dist.get_backend(self.group) == "gloo" else self.group

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Turn an error in the block into RuntimeError on all ranks, in this call and every later
        one."""
        with explaining_transport_errors(self.rank, self.count):
            control = self.control
        control.check()
        try:
            with explaining_transport_errors(self.rank, self.count, control.cause_of_failure):
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
        result: Checked | Exception
        try:
            (text, result), accepted = check(), b"\1"
        except Exception as error:
            result = error
            text, accepted = f"{type(error).__name__}: {error}", b"\0"
        message = accepted + hashlib.sha256(text.encode()).digest() + text.encode()
        message = message[: 1 + _DIGEST + _TEXT].ljust(1 + _DIGEST + _TEXT, b"\0")
        messages = self._all(message)
        if isinstance(result, Exception):
            raise result
        texts = [m[1 + _DIGEST :].rstrip(b"\0").decode(errors="replace") for m in messages]
        for rank, other in enumerate(messages):
            if other[:1] == b"\0":
                raise RuntimeError(f"rank {rank} of the group refused its call: {texts[rank]}")
        for rank, other in enumerate(messages):
            if other[: 1 + _DIGEST] != message[: 1 + _DIGEST]:
                raise ValueError(
                    "the ranks' calls differ; accepted: the same sizes, types and options on all. "
                    f"Rank {self.rank}: {texts[self.rank]}. Rank {rank}: {texts[rank]}"
                )
        return result

    def _all(self, message: bytes) -> list[bytes]:
        local = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        messages = [torch.empty_like(local) for _ in range(self.count)]
        with self.failing_together():
            dist.all_gather(messages, local, group=self.control.group)
        return [bytes(tensor.tolist()) for tensor in messages]

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Start sends and receives of contiguous tensors; between two ranks their order counts."""
        group = self._moves
        operations = [
            dist.P2POp(function, tensor, dist.get_global_rank(group, rank), group)
            for function, transfers in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in transfers
        ]
        if not operations:
            return Transfer()
        works = dist.batch_isend_irecv(operations)
        return Transfer(works, [operation.tensor for operation in operations])

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        gathered = local.new_empty((self.count, *local.shape))
        _all_gather(gathered.flatten(0, 1), local.contiguous(), group=self._moves)
        return gathered

    def exchange(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return (ranks, ...): the tensor that each rank sends here. by_rank: for each rank."""
        received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, by_rank.contiguous(), group=self._moves)
        return received


@contextlib.contextmanager
def explaining_transport_errors(
    rank: int, count: int, cause: Callable[[], str] = str
) -> Iterator[None]:
    """Explain an error that the transport raises in the block: another rank has failed in its call,
    has ended, or is late. Other errors, such as that of a tensor's dtype, pass unchanged.

    NCCL raises nothing here; its watchdog reports the error later. cause: returns the report of the
    first failed rank, or "".
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
            else f"rank {rank} of {count} heard nothing of another rank, which has ended, or did "
            f"not call in time: {error}"
        ) from error


def _is_transport_error(error: RuntimeError) -> bool:
    """Return True if other ranks caused the error. gloo's errors have no type of their own; their
    text begins with a file of gloo's source."""
    if isinstance(error, dist.DistError):
        return "ncclInvalid" not in str(error)
    return re.search(r"gloo[/\\]transport", str(error)) is not None
