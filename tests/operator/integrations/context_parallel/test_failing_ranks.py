"""A rank that raises inside a call over ranks, or ends there, is an error on all at once."""

from __future__ import annotations

import time

import failing_ranks
import pytest
import ranks
from failing_ranks import GPU_PATIENCE, PATIENCE
from ranks import Failed, Pool

#: Seconds in which the others have their error: far more than a step, of kernels that are compiled,
#: takes on a slow machine, and far less than ranks wait for one another.
PROMPT = PATIENCE / 3


@pytest.fixture(scope="module")
def four():
    with Pool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with Pool(2) as pool:
        yield pool


def check(answers, failing):
    """Check the steps as `check_steps` does, and that the group itself still works."""
    for answer in answers:
        assert not isinstance(answer, Failed), answer.trace
    check_steps([found for found, _ in answers], failing)
    assert all(group_works for _, group_works in answers)


def check_steps(answers, failing):
    """All ranks but the failing one hear of it in their first or second step, and nobody is let
    into a third one."""
    when = answers[failing][0].when
    for rank, found in enumerate(answers):
        errors = [one for one in found if one.kind]
        first = errors[0]
        if rank == failing:
            assert first.kind == "Planned" and found[0] == first
        else:
            assert first.kind == "RuntimeError", first
            assert f"rank {failing} raised Planned: out of memory, say" in first.text, first
            assert found.index(first) < 2 and first.when - when < PROMPT
        last = found[-1]
        assert last.kind == "RuntimeError" and last.when - when < PROMPT
        assert f"takes no more calls over ranks, since one has failed: rank {failing}" in last.text


@pytest.mark.simulator
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("way", ["ring_attention", "all_gather_attention", "ulysses_attention"])
@pytest.mark.sampled("ring_attention-True")
def test_a_rank_that_raises_inside_a_call_is_an_error_on_all(two, way, in_backward):
    check(two.run(failing_ranks.raises_inside, 1, way, in_backward, 0), 1)


@pytest.mark.simulator
@pytest.mark.parametrize("ends_early", [True, False])
@pytest.mark.parametrize("way", ["ring_attention", "all_gather_attention", "ulysses_attention"])
@pytest.mark.sampled("ring_attention-True", "ulysses_attention-False")
def test_the_end_of_a_recomputation_is_no_failure(two, way, ends_early):
    for answer in two.run(failing_ranks.checkpointed, way, ends_early):
        assert not isinstance(answer, Failed), answer.trace
        assert not answer


@pytest.mark.simulator
def test_a_rank_that_has_done_its_part_hears_at_its_next_call(two):
    """A rank's last kernel fails, when it has sent all that it must."""
    answers = two.run(failing_ranks.raises_inside, 0, "ring_attention", False, 1)
    check(answers, 0)


@pytest.mark.simulator
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.sampled
def test_one_of_four(four, in_backward):
    check(four.run(failing_ranks.raises_inside, 2, "ring_attention", in_backward, 0), 2)


def check_ended(answers):
    """Check that all others report the end of rank 1."""
    assert answers.pop(1) is None
    for other in answers:
        assert not isinstance(other, Failed), other.trace
        assert other.kind == "RuntimeError" and "heard nothing of another rank" in other.text


@pytest.mark.simulator
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.sampled
def test_a_rank_that_ends_before_its_call_is_an_error_on_all(count):
    with Pool(count) as pool:
        check_ended(pool.run(failing_ranks.dies))


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("count", "way", "in_backward"),
    [
        (2, "ring_attention", False),
        (2, "ring_attention", True),
        (2, "ulysses_attention", False),
        # One of them does not exchange with the one that ends.
        (4, "ring_attention", True),
    ],
)
@pytest.mark.sampled
def test_a_rank_that_ends_inside_a_call_is_an_error_on_all(count, way, in_backward):
    with Pool(count) as pool:
        check_ended(pool.run(failing_ranks.dies_inside, 1, way, in_backward))


@pytest.mark.cuda(2)
@pytest.mark.parametrize(
    ("way", "in_backward"),
    [("ring_attention", False), ("ring_attention", True), ("ulysses_attention", False)],
)
def test_over_nccl_hosts_hear_at_once_and_gpus_are_let_go(device, monkeypatch, way, in_backward):
    """A GPU by NCCL's watchdog, which ends the process that it belongs to, or fails what waits."""
    with Pool(2, device) as pool:
        answers = pool.run(failing_ranks.raises_inside_on_gpu, 1, way, in_backward)
        for answer in answers:
            assert not isinstance(answer, Failed), answer.trace
        check_steps(answers, 1)
        monkeypatch.setattr(ranks, "LONGEST", 6 * GPU_PATIENCE)
        begin = time.monotonic()
        for answer in pool.run(failing_ranks.waits_for_its_gpu):
            assert not isinstance(answer, Failed), answer.text
        print(way, in_backward, answers, f"let go after {time.monotonic() - begin:.0f} s")
