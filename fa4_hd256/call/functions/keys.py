"""Keys of functions that users write in CuTe DSL, made of what these mean."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

from ...kernels.functions.kernel_functions import Functions
from ...kernels.functions.user_functions import ALIBI, SCORE_MOD, FunctionKind
from ...words import shown
from ..checks import are_differentiated
from .meaning import digest_of, mean_the_same, note_meaning
from .tensors import check_tensors


def check_function(kind: FunctionKind, key: Any, function: Any, tensors: Any) -> None:
    """Check a user's function. Raises TypeError for another kind; as `check_tensors`."""
    if not isinstance(key, str) or not key:
        raise TypeError(f"key of a {kind.title} is {shown(key)}; accepted: a str that is not empty")
    if not callable(function):
        raise TypeError(
            f"function of a {kind.title} is {type(function).__name__}; accepted: a function of "
            f"{kind.arguments}"
        )
    check_tensors(kind, tensors, key)


def register(kind: FunctionKind, key: str, functions: Functions) -> None:
    """Let kernels find functions by a key. Raises ValueError for a key that names other functions
    already, or the same ones when they meant something else."""
    known = kind.known(key)
    if known is not None and not mean_the_same(known, functions):
        raise ValueError(
            f"the key {key!r} of a {kind.argument} names other functions already; accepted: a key "
            f"for each, as {kind.title}.of derives it"
        )
    kind.register(key, functions)
    # The package's own functions do not change, and a call that is traced cannot make a note.
    is_own = kind is SCORE_MOD and key == ALIBI
    if kind.users_key(key) == key and not is_own:
        note_meaning(kind, key, functions)


class KernelFunction:
    """A function of the user's that kernels evaluate: a `ScoreMod` or a `MaskMod`. accepted: what
    users may pass, in words."""

    kind: ClassVar[FunctionKind]
    accepted: ClassVar[str]
    key: str
    tensors: tuple[torch.Tensor, ...]

    def with_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Self:
        """Return the same with other tensors; the function is not looked at again. Raises TypeError
        or ValueError for tensors that kernels cannot read."""
        check_tensors(self.kind, tensors, self.key)
        other = copy.copy(self)
        object.__setattr__(other, "tensors", tensors)
        return other

    @classmethod
    def read_by(cls, given: Any) -> tuple[dict[str, torch.Tensor], str | None]:
        """Return (tensors that a call's function reads, by operator argument; its key), none for
        None. Raises TypeError for another kind, ValueError for tensors that require gradients."""
        if given is None:
            return {}, None
        name = cls.kind.argument
        if not isinstance(given, cls):
            raise TypeError(f"{name} is {type(given).__name__}; accepted: {cls.accepted}")
        if are_differentiated(given.tensors):
            raise ValueError(
                f"a tensor of {name} requires gradients, and there are none to it; "
                "accepted: tensors that do not (tensor.detach()), or a call under torch.no_grad()"
            )
        return dict(zip(cls.kind.tensors, given.tensors)), given.key


def key_of(kind: FunctionKind, *functions: Any) -> str:
    """A key of functions, None for one that is not given: of their code, constants, defaults, what
    they close over and the globals that they read.

    These may be numbers, str, None, tuples of such, classes of named tuples, other functions of
    Python, modules of which attributes are read by name, and what CuTe DSL, `math` and Python
    itself offer. Raises ValueError for anything else, whose meaning another process could not tell.
    """
    name = getattr(functions[0], "__name__", kind.argument)
    key = f"{name}-{digest_of(functions)}"
    count = len(functions)
    kind.note_derived(key, lambda traced: key_of(kind, *traced[:count]))
    return key
