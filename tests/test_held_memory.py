"""Release of the memory that test modules leave behind: `held_memory`."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import held_memory
from operator_memory import forget_calls

from fa4_hd256.run import compile


def test_caches_are_emptied_above_the_limit_only(monkeypatch):
    module = ModuleType("bench.stand_in")
    module.traced = functools.cache(lambda number: [number])
    monkeypatch.setitem(sys.modules, "bench.stand_in", module)
    monkeypatch.setitem(compile._memory, "a kernel", object())
    monkeypatch.setattr(held_memory, "_resident_after_release", 0)
    module.traced(1)
    assert not held_memory.release_above(1 << 60, forget_calls)
    assert "a kernel" in compile._memory and module.traced.cache_info().currsize == 1
    assert held_memory.release_above(0, forget_calls)
    assert not compile._memory and module.traced.cache_info().currsize == 0


def test_caches_are_left_alone_where_a_process_stays_as_large(monkeypatch):
    resident, left = [1 << 30], []
    monkeypatch.setattr(held_memory, "_resident_after_release", 0)
    monkeypatch.setattr(held_memory, "resident_bytes", lambda: resident[0])

    def release():
        return held_memory.release_above(1 << 29, lambda: left.append(resident[0]))

    assert release() and not release()
    resident[0] += held_memory.GROWTH
    assert not release()
    resident[0] += 1
    assert release() and not release()
    assert left == [1 << 30, resident[0]]
