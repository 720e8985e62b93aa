"""Objects that live across dynamic loops of device code."""

from __future__ import annotations

import copy
from typing import ClassVar, TypeVar

import cutlass

Self = TypeVar("Self", bound="Carried")


class Carried:
    """Base of objects that CuTe DSL carries through loops and branches by the fields in `CARRIED`.
    Other fields do not change in a loop, nor do those that are None."""

    CARRIED: ClassVar[tuple[str, ...]]

    def __extract_mlir_values__(self) -> list:
        return [
            value
            for name in self.CARRIED
            if getattr(self, name) is not None
            for value in cutlass.extract_mlir_values(getattr(self, name))
        ]

    def __new_from_mlir_values__(self: Self, values: list) -> Self:
        carried, values = copy.copy(self), list(values)
        for name in self.CARRIED:
            if (before := getattr(self, name)) is not None:
                count = len(cutlass.extract_mlir_values(before))
                # Frozen dataclasses are among them.
                object.__setattr__(
                    carried, name, cutlass.new_from_mlir_values(before, values[:count])
                )
                del values[:count]
        return carried
