"""Barrier state against independent models; the rules that hardware leaves undefined are errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm100_sim.errors import BarrierError
from sm100_sim.state.barriers import (
    MAX_COUNT,
    ClusterBarrier,
    MBarrier,
    NamedBarrier,
    RegisterPool,
    pending_count,
)

pytestmark = pytest.mark.simulator


def ignore(_):
    pass


class ModelMBarrier:
    """The PTX ISA's phase rule, kept as a log of what has happened in the current phase.

    `taking_part`: who must arrive in the current phase; `members`: in the next one.
    """

    def __init__(self, count):
        self.members = self.taking_part = count
        self.arrived = self.expected_bytes = self.seen_bytes = self.completed = 0

    def settle(self):
        if self.arrived == self.taking_part and self.expected_bytes == self.seen_bytes:
            self.completed += 1
            self.arrived = self.expected_bytes = self.seen_bytes = 0
            self.taking_part = self.members


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 4)),
        st.tuples(st.just("drop"), st.just(1)),
        st.tuples(st.just("expect"), st.sampled_from([16, 32, 4096])),
        st.tuples(st.just("bytes"), st.sampled_from([16, 32, 4096])),
    ),
    max_size=60,
)


@given(st.integers(1, 6), EVENTS)
def test_phases_follow_the_model(count, events):
    """Arrivals, drops and bytes in any order: phase, parity answers and pending count agree."""
    woken = []
    barrier, model = MBarrier(0x40, count, woken.append), ModelMBarrier(count)
    for kind, number in events:
        left = model.taking_part - model.arrived
        if kind in ("arrive", "drop"):
            # Completing with no member left has no defined next phase.
            if number > left or (kind == "drop" and model.members == 1):
                continue
            state = barrier.arrive(number) if kind == "arrive" else barrier.arrive_drop(number)
            assert pending_count(state) == left
            model.arrived += number
            model.members -= number if kind == "drop" else 0
        elif kind == "expect":
            barrier.expect_tx(number)
            model.expected_bytes += number
        else:
            barrier.complete_tx(number)
            model.seen_bytes += number
        model.settle()
        assert barrier.phase == model.completed == len(woken)
        assert barrier.pending == model.taking_part - model.arrived
        assert barrier.transactions == model.expected_bytes - model.seen_bytes
        # Exactly the parity of the phase before the current one counts as complete.
        assert barrier.parity_complete((model.completed - 1) % 2)
        assert not barrier.parity_complete(model.completed % 2)


def test_parity_one_succeeds_at_once_after_init():
    barrier = MBarrier(0, 1, ignore)
    assert barrier.parity_complete(1) and not barrier.parity_complete(0)


def test_state_tokens():
    barrier = MBarrier(0, 2, ignore)
    first = barrier.arrive()
    assert not barrier.state_complete(first)
    barrier.arrive()
    assert barrier.state_complete(first)
    barrier.arrive(2)
    with pytest.raises(BarrierError, match="neither the current nor"):
        barrier.state_complete(first)
    with pytest.raises(BarrierError, match="not a state"):
        barrier.state_complete(7)


@pytest.mark.parametrize("count", [0, MAX_COUNT + 1])
def test_init_range(count):
    with pytest.raises(BarrierError, match="accepted are 1 to"):
        MBarrier(0, count, ignore)


def test_too_many_arrivals_and_bytes():
    barrier = MBarrier(0x1000128, 2, ignore)
    with pytest.raises(BarrierError, match=r"3 arrivals where 2 are pending.*0x128 of CTA rank 1"):
        barrier.arrive(3)
    barrier.expect_tx(MAX_COUNT)
    with pytest.raises(BarrierError, match="tx-count would become"):
        barrier.expect_tx(1)
    barrier.arrive(2)  # pending 0, bytes outstanding: the phase goes on
    assert barrier.phase == 0
    with pytest.raises(BarrierError, match="where 0 are pending"):
        barrier.arrive()
    barrier.complete_tx(MAX_COUNT)
    assert barrier.phase == 1


def test_no_complete_variant():
    barrier = MBarrier(0, 2, ignore)
    barrier.arrive_no_complete(1)
    with pytest.raises(BarrierError, match="noComplete"):
        barrier.arrive_no_complete(1)


@given(st.lists(st.sampled_from([32, 64, 96]), min_size=1, max_size=6))
def test_named_barrier_rounds(parts):
    """However the arrivals are cut up, the barrier completes exactly when all have come."""
    woken = []
    barrier = NamedBarrier(3, lambda: 0, woken.append)
    for _ in range(2):
        before = len(woken)
        for i, part in enumerate(parts):
            assert barrier.arrive(part, sum(parts)) == (i == len(parts) - 1)
        assert len(woken) == before + 1
        assert barrier.arrived == 0


def test_named_barrier_misuse():
    barrier = NamedBarrier(3, lambda: 128, ignore)
    with pytest.raises(BarrierError, match="multiples of 32"):
        barrier.arrive(32, 48)
    barrier.arrive(32, 96)
    with pytest.raises(BarrierError, match="count of 64, while 32 threads have arrived"):
        barrier.arrive(32, 64)
    with pytest.raises(BarrierError, match="128 threads arrived, 96 were expected"):
        barrier.arrive(96, 96)


def test_named_barrier_of_all_threads_ignores_exited_ones():
    present = [96]
    barrier = NamedBarrier(0, lambda: present[0], ignore)
    assert not barrier.arrive(64, None)
    present[0] = 64
    assert barrier.settle()


def test_named_barrier_votes():
    results = []
    barrier = NamedBarrier(0, lambda: 64, ignore)
    for ayes in (3, 32):
        barrier.vote(ayes, 32, lambda *totals: results.append(totals))
        barrier.arrive(32, 64)
    assert results == [(35, 64), (35, 64)]


def test_cluster_barrier():
    woken = []
    barrier = ClusterBarrier(96, woken.append)
    barrier.arrive("a", 0xFFFFFFFF)
    assert barrier.wait("a", 0xFFFFFFFF) == 0xFFFFFFFF
    with pytest.raises(BarrierError, match="twice without a wait"):
        barrier.arrive("a", 1)
    with pytest.raises(BarrierError, match="without an arrive"):
        barrier.wait("b", 1)
    barrier.arrive("b", 0x0000FFFF)
    barrier.arrive("b", 0xFFFF0000)
    assert not woken
    barrier.exit("c", 0xFFFFFFFF)
    assert len(woken) == 1
    assert barrier.wait("a", 0xFFFFFFFF) == 0
    # Lanes of one warp may be a round apart.
    assert barrier.wait("b", 0x0000FFFF) == 0
    barrier.arrive("b", 0x0000FFFF)
    assert barrier.wait("b", 0xFFFF0000) == 0
    assert barrier.wait("b", 0x0000FFFF) == 0x0000FFFF


def test_cluster_barrier_forgets_arrivals_of_exited_lanes():
    barrier = ClusterBarrier(64, ignore)
    barrier.arrive("a", 0xFFFFFFFF)
    barrier.exit("a", 0x0000FFFF)
    assert (barrier.threads, barrier.arrived, barrier.generation) == (48, 16, 0)
    barrier.arrive("b", 0xFFFFFFFF)
    assert barrier.generation == 1


def test_register_pool():
    """512 threads with 128 registers each: what two warps of a quarter give up serves a third."""
    woken = []
    pool = RegisterPool(16, 128, woken.append)
    assert not pool.increase(0, 256)
    pool.decrease(4, 48)
    assert not pool.increase(0, 256)
    pool.decrease(9, 48)
    assert not pool.increase(0, 256)  # warp 9 is of another quarter
    pool.decrease(12, 48)
    assert pool.increase(0, 256)
    assert len(woken) == 3
    assert pool.free == [32 * (80 + 80 - 128), 32 * 80, 0, 0]
    with pytest.raises(BarrierError, match="dec to 56 registers; the warp has 48"):
        pool.decrease(4, 56)
    with pytest.raises(BarrierError, match="inc to 128 registers; the warp has 256"):
        pool.increase(0, 128)
