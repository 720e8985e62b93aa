"""The rings of a role by the names of their edges."""

from __future__ import annotations

import cutlass

from .edges import EdgeTable, RingState


class RingStates:
    """The states one role keeps, by edge; lives across dynamic loops."""

    def __init__(self, states: dict[str, RingState]) -> None:
        self._states = states

    @classmethod
    def waiting(cls, edges: EdgeTable, *names: str) -> RingStates:
        return cls({name: edges[name].waiter_state() for name in names})

    def __getitem__(self, name: str) -> RingState:
        return self._states[name]

    def advance(self, name: str) -> None:
        self._states[name].advance()

    def __extract_mlir_values__(self) -> list:
        return [v for state in self._states.values() for v in cutlass.extract_mlir_values(state)]

    def __new_from_mlir_values__(self, values: list) -> RingStates:
        pairs = zip(values[::2], values[1::2], strict=True)
        return RingStates(
            {
                name: cutlass.new_from_mlir_values(state, list(pair))
                for (name, state), pair in zip(self._states.items(), pairs, strict=True)
            }
        )
