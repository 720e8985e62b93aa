"""Plans that cannot drain are refused, those that can are not, and one run decides about all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from step_edits import role_of, with_actions, with_edge, with_role, with_stages, without

from fa4_hd256.kernels.blackwell.backward.config import DkdvPlan, DqPlan, ProductsPlan
from fa4_hd256.kernels.blackwell.decode.config import DecodeConfig
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.blackwell.proof.plans import plans_of
from fa4_hd256.kernels.plan.edges import Edge, EdgeTable, Signal
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.proof import drain, programs
from fa4_hd256.kernels.proof.drain import check_drains
from fa4_hd256.kernels.proof.plans import PlanSteps
from fa4_hd256.kernels.proof.programs import OperationKind
from fa4_hd256.kernels.proof.steps import (
    MMA,
    Ring,
    StepTable,
    Verb,
    add,
    again,
    arrive,
    fill,
    multiply,
    read,
    wait,
    write,
)
from fa4_hd256.run import building
from fa4_hd256.run.catalogue import KernelSpec

FORWARD, DQ, DKDV = ForwardConfig(), DqPlan(), DkdvPlan()
#: Not the default of any call; those are proved in test_proved_plans.py.
UNUSUAL = {
    "dK/dV, ring of 3": DkdvPlan(ring_stages=3),
    "decode, fewest buffers": DecodeConfig(half_stages=3, q_stages=1),
}


def steps_of(plan) -> StepTable:
    return plans_of(plan)[0].steps


#: What a tensor core warp issues.
ISSUED = (OperationKind.PRODUCT, OperationKind.COMMIT)


def in_order(steps: StepTable, role: str, *places: int) -> StepTable:
    """The table with the acts of a role in another order."""
    acts = role_of(steps, role).acts
    return with_role(steps, role, acts=tuple(acts[place] for place in places))


def not_ahead(steps: StepTable, role: str, *places: int) -> StepTable:
    """The table with some acts of a role for the step at hand."""
    acts = list(role_of(steps, role).acts)
    for place in places:
        acts[place] = replace(acts[place], is_ahead=False)
    return with_role(steps, role, acts=tuple(acts))


def overwriting(steps: StepTable, content: str) -> StepTable:
    """The table with an MMA that overwrites the sum of the steps before."""

    def change(action):
        operands = tuple(
            write(o.where, o.content) if o.verb is Verb.ADD and o.content == content else o
            for o in action.operands
        )
        return (replace(action, operands=operands),)

    return with_actions(steps, MMA, change)


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_plans_drain(name):
    check_drains("kernel", UNUSUAL[name].edges, steps_of(UNUSUAL[name]))


F, Q, D = map(steps_of, (FORWARD, DQ, DKDV))
#: Mistake -> (edges, steps, words of the refusal: of the edge, and of the step). Mistakes of one
#: action are those of test_step_mistakes.py.
MISTAKES = {
    "loads in another order": (
        FORWARD.edges, in_order(not_ahead(F, "load", 1), "load", 0, 2, 1),
        r"reads K of step 0 of tile 0 from kv .* finds V of step 0"),
    "MMAs in another order": (
        DKDV.edges, in_order(D, MMA, 0, 1, 2, 8, 9, 5, 6, 7, 3, 4),
        r"hangs: .*mma waits for weights_done|reads dS .* finds P"),
    "dP over a dS that is not read yet": (
        DQ.edges, in_order(in_order(Q, MMA, 0, 1, 2, 6, 7, 8, 3, 4, 5), "load", 0, 1, 3, 4, 2),
        r"dP of step 1 of tile 0 may overwrite dp .* gradient of CTA 0 uses dS \(in step 0"),
    "an MMA behind that others wait for": (
        DQ.edges, not_ahead(not_ahead(Q, MMA, 6, 7, 8), "load", 3, 4),
        r"hangs: .*mma waits for ds_done \(in step 0"),
    "a load warp that stays within its tile": (
        FORWARD.edges, with_role(F, "load", crosses=False), r"finds (K|V) of step"),
    "a load warp that wants no tile": (
        FORWARD.edges, with_role(F, "load", claims=None),
        r"hangs: .*load of CTA 0 takes the tile 1.*scheduler"),
    "a sum that is overwritten": (
        DQ.edges, overwriting(Q, "dQ"), r"nobody reads dQ of step 0"),
    "a sum that is overwritten after it was changed": (
        FORWARD.edges, overwriting(F, "O"), r"nobody reads O of step 0"),
    "one S where two are needed": (
        with_stages(FORWARD.edges, s_done=1, p_first_done=1, p_last_done=1), F,
        r"S of step 0 .* finds S of step 1"),
    "one Q where two are needed": (
        with_stages(FORWARD.edges, q_loaded=1, q_free=1, o_staged=4), F,
        r"hangs: .*mma waits for q_loaded \(in step 0 of tile 1\)"),
    "stages that differ": (
        with_stages(FORWARD.edges, kv_loaded=2), F, r"kv_loaded has 2 stages, kv_free 3"),
    "no wait at the end": (FORWARD.edges, with_role(F, MMA, end=()), r"last signal of o_free"),
    "an edge without a ring": (
        EdgeTable((*FORWARD.edges.edges, Edge("x", 1, Signal.WARPS_CTA, "a", 1, "b", "c"))), F,
        r"no ring has \['x'\]"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake):
    edges, steps, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"the kernel cannot work: .*(?:{words})"):
        check_drains("the kernel", edges, steps)


def test_a_configuration_is_refused_before_compiling():
    """The check comes before the kernel is made: of one whose scores are read at once."""

    class Lacking(ForwardConfig):
        @property
        def edges(self):
            return with_edge(super().edges, "s_done", initially_complete=True)

    spec = KernelSpec("forward", Lacking(), ProblemClass(torch.bfloat16))
    with pytest.raises(ValueError, match="the forward kernel cannot work: .* who reads S of step"):
        building.build(spec)


def test_more_results_than_tensor_memory_has_buffers_for():
    class ThreeScores(ForwardConfig):
        @property
        def edges(self):
            return with_stages(super().edges, s_done=3, p_first_done=3, p_last_done=3)

    with pytest.raises(ValueError, match="s has 3 buffers; the TMEM plan lacks s2"):
        plans_of(ThreeScores())[0].prove()


class OneMore(ForwardConfig):
    @property
    def edges(self):
        return with_stages(super().edges, kv_loaded=4, kv_free=4)


class OneSlice(ForwardConfig):
    @property
    def edges(self):
        return with_stages(super().edges, o_staged=2)


class FewWarps(ForwardConfig):
    @property
    def edges(self):
        return with_edge(super().edges, "p_first_done", producer_warps=3)


def apart_from_s():
    rings = (replace(r, over=None, regions=("p",)) if r.name == "p_first" else r for r in F.rings)
    return replace(F, rings=tuple(rings))


@pytest.mark.parametrize(
    ("plan", "steps", "words"),
    [
        (OneMore(), F, "ring kv: kv_loaded has 4 stages, the region kv of the SMEM plan 3"),
        (OneSlice(), F, "ring staged: o_staged has 2 stages, over q there are 8"),
        (FewWarps(), F, "p_first_done is completed by 3 warps of a CTA, softmax has 4"),
        (FORWARD, apart_from_s(), "ring p_first: p0 lies over s0 in the TMEM plan"),
    ],
)
def test_plans_that_do_not_fit_their_steps_are_refused(plan, steps, words):
    with pytest.raises(ValueError, match=f"the kernel cannot work: {words}"):
        PlanSteps("the kernel", plan, steps).prove()


# ------------------------------------------------------------------------------ edits of a table


def p_at_once():
    """P handed over when all of it is made, on one edge."""
    halves = "p_first_done", "p_last_done"
    done = replace(FORWARD.edges["p_last_done"], name="p_done")
    edges = [edge for edge in FORWARD.edges.edges if edge.name not in halves]
    rings = [ring for ring in F.rings if ring.name not in ("p_first", "p_last")]
    whole = {
        wait("p_first_done"): (wait("p_done"),), wait("p_last_done"): (),
        write("p_first", "first P"): (), arrive("p_first_done"): (),
        write("p_last", "last P"): (write("p", "P"),), arrive("p_last_done"): (arrive("p_done"),),
    }  # fmt: skip

    def changed(action):
        if action.content == "PV0":
            return (multiply("PV", read("p", "P"), read("kv", "V"), add("o", "O")),)
        return () if action.content == "PV1" else whole.get(action, (action,))

    steps = replace(F, rings=(*rings, Ring("p", full="p_done", over="s")))
    for role in (MMA, "softmax"):
        steps = with_actions(steps, role, changed)
    return EdgeTable((*edges, done)), steps


def paged_k():
    """K from two pages, on one barrier."""

    def changed(action):
        return (fill("kv", "K", "K"),) if action == fill("kv", "K") else (action,)

    return FORWARD.edges, with_actions(F, "load", changed)


def one_stage_more():
    return with_stages(FORWARD.edges, kv_loaded=4, kv_free=4), F


def a_wait_twice():
    """The second one finds the phase that the first one found."""

    def changed(action):
        return (action, again("o_free")) if action == wait("o_free") else (action,)

    return FORWARD.edges, with_actions(F, MMA, changed)


@pytest.mark.parametrize("edit", [one_stage_more, p_at_once, paged_k, a_wait_twice])
def test_an_edit_of_a_table_drains(edit):
    check_drains("the kernel", *edit())


def test_halves_of_p_need_both_edges():
    with pytest.raises(ValueError, match=r"reads last P of step 0 .* from p_last \(in step 0"):
        check_drains("the kernel", FORWARD.edges, without(F, MMA, wait("p_last_done")))
    with pytest.raises(ValueError, match=r"reads first P .* finds last P"):
        rings = tuple(replace(ring, share=(0, 1)) for ring in F.rings)
        check_drains("the kernel", FORWARD.edges, replace(F, rings=rings))


# --------------------------------------------------------------------------- all interleavings


class Walk:
    """Every order in which the operations of the programs can happen.

    Copies and products are done some time after their issue; products in the order of issue, each
    with the commits behind it.  A state is what every role, the copies under way and the tensor
    core have come to: phases follow from it.
    """

    def __init__(self, edges, steps, tiles) -> None:
        self.edges = {edge.name: edge for edge in edges.edges}
        self.programs = list(programs.Programs(edges, steps, tiles).all().items())
        self.tensor = [
            operation for (name, _), program in self.programs if name == "mma"
            for operation in program if operation.kind in ISSUED
        ]  # fmt: skip
        self.ends = self._walk()

    def _walk(self) -> set:
        begin = (0,) * len(self.programs), frozenset(), 0
        seen, todo, ends = {begin}, [begin], set()
        while todo:
            state = todo.pop()
            following = list(self._following(state))
            if not following:
                ends.add(state)
            for other in following:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        self.states = len(seen)
        return ends

    def _following(self, state):
        places, landed, done = state
        issued = self._issued(places)
        if done < issued:
            yield places, landed, done + 1
        for role, (_, program) in enumerate(self.programs):
            moved = (*places[:role], places[role] + 1, *places[role + 1 :])
            for copy in range(places[role]):
                if program[copy].kind is OperationKind.COPY and (role, copy) not in landed:
                    yield places, landed | {(role, copy)}, done
            if places[role] < len(program) and self._may(program[places[role]], state):
                yield moved, landed, done

    def _issued(self, places) -> int:
        for (name, _), program, place in zip(*zip(*self.programs), places):
            if name == "mma":
                return sum(o.kind in ISSUED for o in program[:place])
        raise AssertionError("no MMA role")

    def _may(self, operation, state) -> bool:
        if operation.kind is OperationKind.ADVANCE:
            return self._count(state, OperationKind.FETCH) >= operation.number
        if operation.kind is OperationKind.FETCH:
            return self._taken(state) >= operation.number - drain.RESPONSES
        if operation.kind is not OperationKind.WAIT:
            return True
        edge = self.edges[operation.edge]
        needed = operation.number // edge.stages + 1 - edge.initially_complete
        return self._phases(state, edge, operation.number % edge.stages) >= needed

    def _phases(self, state, edge, stage) -> int:
        """Completed phases of a stage."""
        places, landed, done = state
        operations = [o for o in self.tensor[:done] if o.kind is OperationKind.COMMIT]
        operations += [self.programs[role][1][copy] for role, copy in landed]
        for (_, program), place in zip(self.programs, places):
            operations += [o for o in program[:place] if o.kind is OperationKind.ARRIVE]
        return sum(o.edge == edge.name and o.number % edge.stages == stage for o in operations)

    def _count(self, state, kind) -> int:
        return sum(
            o.kind is kind
            for (_, program), place in zip(self.programs, state[0]) for o in program[:place]
        )  # fmt: skip

    def _taken(self, state) -> int:
        return min(
            max((o.number for o in program[:place] if o.kind is OperationKind.ADVANCE), default=0)
            for (_, program), place in zip(self.programs, state[0])
        )

    def finished(self) -> bool:
        return all(
            place == len(program)
            for places, _, _ in self.ends for (_, program), place in zip(self.programs, places)
        )  # fmt: skip


#: Plan, CTAs, steps of the tiles, the commit that is left out to make it hang.
WALKS = {
    "products, both CTAs": (ProductsPlan(), (0, 1), (1,), "sum_done"),
    "products, two tiles": (ProductsPlan(), (0,), (2, 0, 1), "sum_done"),
    "dQ": (DQ, (0,), (2,), "dp_done"),
    "forward": (FORWARD, (0,), (2,), "o_done"),
}


@pytest.mark.parametrize("name", WALKS)
@pytest.mark.sampled("products*", "dQ")
def test_every_interleaving_ends_in_the_same_place(name, monkeypatch):
    """NOTE [one run is all runs]: where one run ends, all do, be it at the end or in a hang."""
    plan, ctas, tiles, left_out = WALKS[name]
    for module in (drain, programs):
        monkeypatch.setattr(module, "CTAS", ctas)
    walk = Walk(plan.edges, steps_of(plan), tiles)
    assert len(walk.ends) == 1 and walk.finished() and walk.states > 1000
    broken = without(steps_of(plan), MMA, arrive(left_out))
    walk = Walk(plan.edges, broken, tiles)
    assert len(walk.ends) == 1 and not walk.finished()
    with pytest.raises(ValueError, match="it hangs"):
        drain.Run(plan.edges, broken, tiles).check()
