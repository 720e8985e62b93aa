"""The ring of a dynamic scheduler: its phases are told apart, and no slot is written unread."""

from __future__ import annotations

import pytest
from scheduler_ring import LEADER, RingRun, check_ring, programs

from fa4_hd256.schedulers.protocol import NUM_STAGES

STEPS, HANGS = 7, "the scheduler's ring hangs"


@pytest.mark.parametrize("stages", sorted({1, 2, 3, NUM_STAGES}))
def test_the_ring_works(stages):
    check_ring(stages)


def without(keep) -> RingRun:
    """Return a run in which warps leave operations out: keep(warp, operation)."""
    found = programs(NUM_STAGES, STEPS)
    return RingRun(
        NUM_STAGES, {w: [o for o in program if keep(w, o)] for w, program in found.items()}
    )


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        # The scheduler does not wait for a free slot: who has read slowly misses a phase.
        (lambda w, o: not (w[0] == "scheduler" and o.place[0] == "empty" and o.verb == "wait"),
         "before this: reader of CTA|ambiguous"),
        # A reader of the peer does not give its slot back, and is counted.
        (lambda w, o: not (w == ("reader", 1) and o.verb == "arrive"), HANGS),
        # Nobody wants a tile.
        (lambda w, o: not (o.place[0] == "wanted" and o.verb == "arrive"), HANGS),
        # Requests go out as fast as slots are free.
        (lambda w, o: not (o.place[0] == "wanted" and o.verb == "wait" and o.number % 2),
         "an arrival on wanted .slot 1. may fall into the phase before its own"),
        # A slot is read without a wait for the answer.
        (lambda w, o: not (w == ("reader", LEADER) and o.place[0] == "full"),
         "may not have been written"),
    ],
    ids=["no free slot", "a peer that reads on", "nothing wanted", "wanted unseen", "no answer"],
)  # fmt: skip
def test_a_ring_that_cannot_work_is_refused(keep, text):
    with pytest.raises(ValueError, match=text):
        without(keep).check()
