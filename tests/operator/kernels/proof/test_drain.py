"""Plans that cannot drain are refused, those that can are not, and one run decides about all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa4_hd256.kernels.blackwell.backward.config import DkdvPlan, DqPlan, DvPlan, ProductsPlan
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3, DecodeConfig
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.blackwell.proof.plans import plans_of
from fa4_hd256.kernels.plan.edges import Edge, EdgeTable, Signal
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.proof import drain, programs
from fa4_hd256.kernels.proof.drain import check_drains
from fa4_hd256.kernels.proof.plans import PlanSteps
from fa4_hd256.kernels.proof.programs import OperationKind
from fa4_hd256.kernels.proof.steps import (
    Advance,
    Copy,
    EdgeUse,
    Issue,
    Load,
    Operand,
    Ring,
    StepTable,
    Want,
    When,
    arrive,
    each,
    first,
    last,
    read,
    write,
)
from fa4_hd256.run import building
from fa4_hd256.run.catalogue import KernelSpec

FORWARD, DQ, DKDV = ForwardConfig(), DqPlan(), DkdvPlan()
PLANS = {
    "forward": FORWARD,
    "forward, one S": ForwardConfig(s_stages=1),
    "dQ": DQ,
    "dK/dV": DKDV,
    "dK/dV, ring of 3": DkdvPlan(ring_stages=3),
    "dV and dS": DvPlan(),
    "dK and dQ from dS": ProductsPlan(),
    "decode": DECODE[0],
    "decode, fewest buffers": DecodeConfig(half_stages=3, q_stages=1),
    "decode, e4m3": DECODE_E4M3[0],
    "decode, e4m3, one Q": DECODE_E4M3[2],
}


def steps_of(plan) -> StepTable:
    return plans_of(plan)[0].steps


#: What a tensor core warp issues.
ISSUED = (OperationKind.PRODUCT, OperationKind.COMMIT)


def named(steps: StepTable, name: str):
    return next(product for product in steps.products if product.name == name)


def with_product(steps: StepTable, name: str, **changes) -> StepTable:
    products = tuple(replace(p, **changes) if p.name == name else p for p in steps.products)
    return replace(steps, products=products)


def without(steps: StepTable, name: str, edge: str) -> StepTable:
    """The table with one wait or commit of a product left out."""
    product = named(steps, name)
    return with_product(
        steps, name,
        waits=tuple(use for use in product.waits if use.edge != edge),
        commits=tuple(use for use in product.commits if use.edge != edge),
    )  # fmt: skip


def with_edge(edges: EdgeTable, name: str, **changes) -> EdgeTable:
    return EdgeTable(tuple(replace(e, **changes) if e.name == name else e for e in edges.edges))


def with_stages(edges: EdgeTable, **stages: int) -> EdgeTable:
    return EdgeTable(
        tuple(replace(edge, stages=stages.get(edge.name, edge.stages)) for edge in edges.edges)
    )


def with_role(steps: StepTable, name: str, change) -> StepTable:
    return replace(
        steps, roles=tuple(change(role) if role.name == name else role for role in steps.roles)
    )


def lacking(action):
    """A role without one of its actions."""

    def change(role):
        acts = tuple(
            replace(act, actions=tuple(a for a in act.actions if a != action)) for act in role.acts
        )
        return replace(role, acts=acts)

    return change


class NoTail(StepTable):
    """Step table without the waits at the end of the MMA role."""

    def mma_tail(self, edges):
        return ()


class SkipsFirst(StepTable):
    """Tiles without steps are skipped before the last product of the tile, not after it."""

    def _look_ahead(self, tiles):
        tile = yield from self._next_with_steps(tiles, 0)
        yield from self._start(tiles, tile)
        while tile < len(tiles):
            yield Want(tile + 1)
            for step in range(1, tiles[tile]):
                for product in self.products:
                    yield Issue(product, tile, step - (not product.is_ahead), tiles[tile])
            yield Advance(tile + 1)
            following = yield from self._next_with_steps(tiles, tile + 1)
            for product in self.products:
                if not product.is_ahead:
                    yield Issue(product, tile, tiles[tile] - 1, tiles[tile])
                elif following < len(tiles):
                    yield Issue(product, following, 0, tiles[following])
            tile = following


class WantsLate(StepTable):
    """The load role wants a tile when it has it."""

    def walk(self, tiles):
        wants = [item for item in super().walk(tiles) if isinstance(item, Want)]
        for item in super().walk(tiles):
            if not isinstance(item, Want):
                yield item
            if isinstance(item, Advance):
                yield wants[item.tile - 1]


def same(kind: type, steps: StepTable) -> StepTable:
    return kind(steps.rings, steps.products, steps.roles)


#: Not the default of any call; those are proved in test_proved_plans.py.
UNUSUAL = ("forward, one S", "dK/dV, ring of 3", "decode, fewest buffers")


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_plans_drain(name):
    check_drains("kernel", PLANS[name].edges, steps_of(PLANS[name]))


F, Q, D = map(steps_of, (FORWARD, DQ, DKDV))
QK, PV0, PV1 = F.products
#: Mistake -> (edges, steps, words of the refusal: of the edge, and of the step).
MISTAKES = {
    "a missing commit of a buffer": (
        FORWARD.edges, without(F, "QK", "kv_free"),
        r"reads V of step 0 of tile 0 from kv .* finds K of step 0"),
    "a missing commit of a result": (
        FORWARD.edges, without(F, "QK", "s_done"),
        r"hangs: mma waits for p_first_done \(PV0 of step 0"),
    "results never handed over": (
        DQ.edges, without(Q, "dQ", "dq_done"), r"hangs: .*gradient .* dq_done \(in step 0"),
    "no wait for an operand": (
        FORWARD.edges, without(F, "PV0", "p_first_done"),
        r"reads first P of step 0 of tile 0 from p_first \(PV0"),
    "no wait for a load": (
        FORWARD.edges, without(F, "QK", "kv_loaded"),
        r"nothing makes who reads K of step 0 .* wait for this: load of CTA 0"),
    "a wait that is left to luck": (
        DQ.edges, without(Q, "dQ", "ds_done"), r"reads dS of step 0 .* from ds \(dQ"),
    "no wait for a result's buffer": (
        FORWARD.edges, without(F, "PV0", "o_free"), r"last signal of o_free"),
    "a buffer freed too often": (
        DQ.edges, with_product(Q, "S", commits=(*named(Q, "S").commits[:2], each("q_free"))),
        r"parity of q_free \(stage \d\) is ambiguous"),
    "loads in another order": (
        FORWARD.edges,
        with_product(with_product(F, "QK", loads=(QK.loads[0], *PV0.loads)), "PV0",
                     loads=QK.loads[1:]),
        r"reads K of step 0 of tile 0 from kv \(QK of step 0 of tile 0\) finds V of step 0"),
    "an operand that nobody loads": (
        FORWARD.edges, with_product(F, "PV0", loads=()),
        r"mma waits for kv_loaded \(PV0 of step 0"),
    "products in another order": (
        DKDV.edges, replace(D, products=(D.products[0], *D.products[:0:-1])),
        r"hangs: mma waits for weights_done|reads dS .* finds P"),
    "dP over a dS that is not read yet": (
        DQ.edges, replace(Q, products=(Q.products[0], Q.products[2], Q.products[1])),
        r"dP of step 1 of tile 0 may overwrite dp .* gradient of CTA 0 uses dS \(in step 0"),
    "a product behind that others wait for": (
        DQ.edges,
        with_product(Q, "dP", is_ahead=False, waits=named(Q, "dP").waits[1:],
                     commits=named(Q, "dP").commits[:2], loads=named(Q, "dP").loads[1:]),
        r"hangs: mma waits for ds_done \(dQ of step 0"),
    "one S where two are needed": (
        with_stages(FORWARD.edges, s_done=1, p_first_done=1, p_last_done=1), F,
        r"S of step 0 .* finds S of step 1"),
    "one Q where two are needed": (
        with_stages(FORWARD.edges, q_loaded=1, q_free=1, o_staged=4), F,
        r"hangs: mma waits for q_loaded \(QK of step 0 of tile 1\)"),
    "stages that differ": (
        with_stages(FORWARD.edges, kv_loaded=2), F, r"kv_loaded has 2 stages, kv_free 3"),
    "no wait at the end": (FORWARD.edges, same(NoTail, F), r"last signal of o_free"),
    "skipping before the last product": (
        FORWARD.edges, same(SkipsFirst, F), r"hangs: mma takes the tile 3"),
    "wanting a tile after it was taken": (
        FORWARD.edges, same(WantsLate, F), r"hangs: .*load of CTA 0 takes the tile 1.*scheduler"),
    "the end of the sums after dV": (
        DKDV.edges,
        with_product(without(D, "dK", "sums_done"), "dV",
                     commits=(*named(D, "dV").commits, last("sums_done"))),
        r"reads dK of step 0 of tile 0 from sums"),
    "an edge without a ring": (
        EdgeTable((*FORWARD.edges.edges, Edge("x", 1, Signal.WARPS_CTA, "a", 1, "b", "c"))), F,
        r"no ring has \['x'\]"),
    "a tile's wait after a step's": (
        DQ.edges, with_product(Q, "dQ", waits=named(Q, "dQ").waits[::-1]),
        r"dQ waits in a tile's first step, or in each, and in this order"),
    "a tile's commit before a step's": (
        DQ.edges, with_product(Q, "dQ", commits=named(Q, "dQ").commits[::-1]),
        r"dQ commits in each step, or in a tile's last one, and in this order"),
    "the end of a tile in its middle": (
        DQ.edges,
        replace(Q, products=tuple(
            replace(p, is_ahead=False, waits=p.waits[p.waits[0].when is When.FIRST :])
            for p in Q.products)),
        r"none is ahead, so a tile ends with the last MMA, not S"),
    "Q loaded for a product that is not ahead": (
        DQ.edges, with_product(Q, "S", is_ahead=False), r"S is not ahead, so what it needs"),
}  # fmt: skip


def with_uses(steps: StepTable, name: str, edge: str, when: When) -> StepTable:
    """The table with an edge of a product waited for, or committed, in other steps."""
    product = named(steps, name)
    waits, commits = (
        tuple(EdgeUse(use.edge, when) if use.edge == edge else use for use in uses)
        for uses in (product.waits, product.commits)
    )
    return with_product(steps, name, waits=waits, commits=commits)


ONE_S = PLANS["forward, one S"]
MISTAKES |= {
    "a wait in steps that the roles do not know": (
        FORWARD.edges, with_uses(F, "PV0", "kv_loaded", When.LAST),
        r"PV0 waits in a tile's first step, or in each"),
    "a commit in steps that the roles do not know": (
        DQ.edges, with_uses(Q, "dQ", "dq_done", When.NOT_LAST), r"dQ commits in each step, or in"),
    "a load in steps that the roles do not know": (
        FORWARD.edges,
        with_product(F, "PV0", loads=(replace(PV0.loads[0], when=When.LAST),)),
        r"PV0 loads in a tile's first step, or in each"),
    "a wait of a tile's first step before the product that it waits for": (
        ONE_S.edges,
        with_product(steps_of(ONE_S), "PV0", waits=(first("p_first_done"), *PV0.waits[:2])),
        r"none is ahead, so p_first_done belongs to the first MMA, not PV0"),
    "a buffer that one product waits for and another one leaves": (
        FORWARD.edges,
        with_product(
            without(F, "QK", "kv_free"), "PV1", commits=(each("kv_free"), *PV1.commits)),
        r"reads V of step 0 of tile 0 from kv .* finds K of step 0"),
    "a sum that is overwritten": (
        DQ.edges, with_product(Q, "dQ", overwrites=When.EACH), r"nobody reads dQ of step 0"),
    "a sum that is overwritten after it was changed": (
        FORWARD.edges, with_product(F, "PV0", overwrites=When.EACH), r"nobody reads O of step 0"),
    "a result that nobody reads": (
        FORWARD.edges, with_role(F, "correction", lacking(read("scale", "1/sum"))),
        r"nobody reads 1/sum of step 0"),
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
    with pytest.raises(ValueError, match="the forward kernel cannot work: who reads S of step"):
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
    done = replace(FORWARD.edges["p_last_done"], name="p_done")
    edges = [
        edge for edge in FORWARD.edges.edges if edge.name not in ("p_first_done", "p_last_done")
    ]
    rings = [ring for ring in F.rings if ring.name not in ("p_first", "p_last")]
    pv = replace(
        PV0, name="PV", a=Operand("P", "p"), b=Operand("V", "kv"),
        waits=(*PV0.waits[:-1], each("p_done")), commits=PV1.commits,
    )  # fmt: skip

    def at_once(role):
        first, step, last = role.acts
        step = replace(step, actions=(*step.actions[:-4], write("p", "P"), arrive("p_done")))
        return replace(role, acts=(first, step, last))

    rings = (*rings, Ring("p", full="p_done", over="s"))
    steps = with_role(replace(F, rings=rings, products=(QK, pv)), "softmax", at_once)
    return EdgeTable((*edges, done)), steps


def paged_k():
    """K from two pages, on one barrier."""
    page = Copy("K", "k", "k")
    return FORWARD.edges, with_product(F, "QK", loads=(QK.loads[0], Load("kv", (page, page))))


def one_stage_more():
    return with_stages(FORWARD.edges, kv_loaded=4, kv_free=4), F


def all_ahead():
    steps = with_product(with_product(F, "PV0", is_ahead=True), "PV1", is_ahead=True)
    return FORWARD.edges, steps


def a_wait_twice():
    """The second one finds the phase that the first one found."""
    return FORWARD.edges, with_product(F, "PV0", waits=(*PV0.waits, each("o_free")))


@pytest.mark.parametrize("edit", [one_stage_more, p_at_once, paged_k, all_ahead, a_wait_twice])
def test_an_edit_of_a_table_drains(edit):
    check_drains("the kernel", *edit())


def test_halves_of_p_need_both_edges():
    with pytest.raises(ValueError, match=r"reads last P of step 0 .* from p_last \(PV1 of step 0"):
        check_drains("the kernel", FORWARD.edges, without(F, "PV1", "p_last_done"))
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


#: Plan, CTAs, steps of the tiles, a product and the commit that is left out to make it hang.
WALKS = {
    "products, both CTAs": (ProductsPlan(), (0, 1), (1,), ("sum", "sum_done")),
    "products, two tiles": (ProductsPlan(), (0,), (2, 0, 1), ("sum", "sum_done")),
    "dQ": (DQ, (0,), (2,), ("dP", "dp_done")),
    "forward": (FORWARD, (0,), (2,), ("PV1", "o_done")),
}


@pytest.mark.parametrize("name", WALKS)
def test_every_interleaving_ends_in_the_same_place(name, monkeypatch):
    """NOTE [one run is all runs]: where one run ends, all do, be it at the end or in a hang."""
    plan, ctas, tiles, left_out = WALKS[name]
    for module in (drain, programs):
        monkeypatch.setattr(module, "CTAS", ctas)
    walk = Walk(plan.edges, steps_of(plan), tiles)
    assert len(walk.ends) == 1 and walk.finished() and walk.states > 1000
    broken = without(steps_of(plan), *left_out)
    walk = Walk(plan.edges, broken, tiles)
    assert len(walk.ends) == 1 and not walk.finished()
    with pytest.raises(ValueError, match="it hangs"):
        drain.Run(plan.edges, broken, tiles).check()
