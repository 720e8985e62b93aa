"""What ranks send one another: what they were called with, and rows of tensors.

Everything that one rank does here all ranks of the group do, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["Ranks", "Transfer", "heard"]

Checked = TypeVar("Checked")

#: Into one tensor, rank after rank; before PyTorch 2.13 under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes of what a rank says of its call: whether it is accepted, a digest, a text.
_DIGEST, _SAID = 32, 768

#: Of groups whose backend moves GPU memory alone, one of the same ranks on the CPU.
_on_cpu: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Transfer:
    """Sends and receives under way."""

    def __init__(
        self,
        works: Sequence[Any] = (),
        kept: Sequence[torch.Tensor] = (),
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        """ranks: this one's number, and how many there are, for errors."""
        # Kept until they are sent.
        self._works, self._kept, self._ranks = works, kept, ranks

    def wait(self) -> None:
        """The current stream, on the CPU the caller, waits for them."""
        with heard(*self._ranks):
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
        """What all ranks say; nothing waits for a GPU."""
        group = _cpu_group(self.group)
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with heard(self.own, self.count):
            dist.all_gather(found, own, group=group)
        return [bytes(tensor.tolist()) for tensor in found]

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Begin to send contiguous tensors to ranks, and to receive others; between two ranks in
        the order in which they are given."""
        operations = [
            dist.P2POp(function, tensor, dist.get_global_rank(self.group, rank), self.group)
            for function, given in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in given
        ]
        ranks = self.own, self.count
        if not operations:
            return Transfer()
        with heard(*ranks):
            works = dist.batch_isend_irecv(operations)
        return Transfer(works, [operation.tensor for operation in operations], ranks)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(ranks, ...) of every rank's tensor."""
        found = own.new_empty((self.count, *own.shape))
        with heard(self.own, self.count):
            _all_gather(found.flatten(0, 1), own.contiguous(), group=self.group)
        return found

    def exchange(self, given: torch.Tensor) -> torch.Tensor:
        """(ranks, ...), rank by rank what it has for this one; given: likewise for the others."""
        found = torch.empty_like(given, memory_format=torch.contiguous_format)
        with heard(self.own, self.count):
            dist.all_to_all_single(found, given.contiguous(), group=self.group)
        return found


@contextlib.contextmanager
def heard(own: int, count: int) -> Iterator[None]:
    """Inside, an error of the transport's says what it means: another rank has ended, or is late.
    NCCL tells of it later, by its watchdog. Other errors, of a tensor's type for one, pass as they
    are."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_transport(error):
            raise
        raise RuntimeError(
            f"rank {own} of {count} heard nothing of another rank, which has ended, or did not "
            f"call in time: {error}"
        ) from error


def _is_of_transport(error: RuntimeError) -> bool:
    """Whether the other ranks are the reason, and not the call. gloo's errors have no type of their
    own, but begin with the place in its source."""
    if isinstance(error, dist.DistError):
        return "ncclInvalid" not in str(error)
    return re.search(r"gloo[/\\]transport", str(error)) is not None


def _cpu_group(group: Any) -> Any:
    """A group of the same ranks that moves CPU memory."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _on_cpu:
        _on_cpu[group] = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
    return _on_cpu[group]
