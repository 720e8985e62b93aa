"""What every warp waits for and signals, as the simulator traces it, is what the table of steps
says: the generated roles, and those written by hand, as the check of the plan knows them."""

from __future__ import annotations

import itertools

import pytest
import torch

import sm100_sim
from fa4_hd256 import BackwardConfig, ForwardConfig, flash_attn_func
from fa4_hd256.kernels.programs import Kind, Programs
from fa4_hd256.kernels.steps import CLAIM_STEPS

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

ADDRESS_BITS = 0xFFFFFF  # of an address in the cluster: the rest is the CTA
SMEM_START = 1024  # the first 1 KiB of shared memory is the system's
TILE_Q, TILE_K = 256, 128


@pytest.fixture
def reports(monkeypatch):
    """Reports, with traces, of the launches that follow, on one CTA pair."""
    found, plain = [], sm100_sim.launch

    def launch(compiled, *arguments, **options):
        found.append(plain(compiled, *arguments, **{**options, "trace": True}))
        return found[-1]

    monkeypatch.setattr(sm100_sim, "launch", launch)
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:2")
    return found


def happened(report, plan, warp, cta):
    """(kind, edge, stage, parity of a wait) of a warp's waits, signals, copies and products."""
    places = [(edge.name, stage) for edge in plan.edges.edges for stage in range(edge.stages)]
    start = SMEM_START + plan.smem.offsets()["barriers"]
    found = []
    for entry in report.trace:
        if (entry.warp, entry.ctaid[0]) != (warp, cta):
            continue
        kind, operand = of_entry(entry.opcode)
        if kind is Kind.PRODUCT:
            found.append((kind, "", 0, None))
        elif kind is not None:
            index = ((entry.operands[operand] & ADDRESS_BITS) - start) // 8
            if 0 <= index < len(places):  # else a barrier of the scheduler
                parity = entry.operands[2] if kind is Kind.WAIT else None
                found.append((kind, *places[index], parity))
    # A copy has several boxes, a product several instructions.
    return [step for step, _ in itertools.groupby(found)]


def of_entry(opcode):
    """(kind of an operation, its operand that is a barrier), (None, 0) for others."""
    if opcode.startswith("mbarrier.try_wait"):
        return Kind.WAIT, 1
    if opcode.startswith("mbarrier.arrive") and "expect_tx" not in opcode:
        return Kind.ARRIVE, 1
    if opcode.startswith("cp.async.bulk.tensor") and "mbarrier" in opcode:
        return Kind.COPY, 2
    if opcode.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
        return Kind.COPY, 3
    if opcode.startswith("tcgen05.commit"):
        return Kind.COMMIT, 0
    return (Kind.PRODUCT, 0) if opcode.startswith("tcgen05.mma.") else (None, 0)


def declared(plan, tiles):
    """The same of each (role, CTA), from the table of steps."""
    found = {}
    for role, program in Programs(plan.edges, plan.steps, tiles).all().items():
        found[role] = []
        for operation in program:
            if operation.kind is Kind.PRODUCT:
                found[role].append((operation.kind, "", 0, None))
            elif operation.kind in (Kind.WAIT, Kind.ARRIVE, Kind.COPY, Kind.COMMIT):
                edge = plan.edges[operation.edge]
                phase, stage = divmod(operation.number, edge.stages)
                parity = (phase - edge.initially_complete) % 2
                is_wait = operation.kind is Kind.WAIT
                found[role].append((operation.kind, edge.name, stage, parity if is_wait else None))
    del found["scheduler", 0]
    return found


def assert_as_declared(report, plan, tiles):
    for (role, cta), expected in declared(plan, tiles).items():
        warps = getattr(plan.warps, role)
        for warp in (warps[0], warps[-1]) if isinstance(warps, tuple) else (warps,):
            assert happened(report, plan, warp, cta) == expected, (role, cta, warp)


def steps_of(seen, rows, columns):
    """For each block of rows, how many blocks of columns any of them sees."""
    return tuple(
        sum(
            bool(seen[first : first + rows, begin : begin + columns].any())
            for begin in range(0, seen.shape[1], columns)
        )
        for first in range(0, seen.shape[0], rows)
    )


def attend(lengths, causal, backward=None, **options):
    """Attention of one head, and its gradients where a configuration for them is given; returns
    which keys each query sees."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, length, 1, 256).bfloat16().requires_grad_(backward is not None)
        for length in (lengths[0], lengths[1], lengths[1])
    )
    if backward is not None:
        options["backward_config"] = backward
    out = flash_attn_func(q, k, v, causal=causal, num_splits=1, **options)
    if backward is not None:
        out.backward(torch.randn_like(out))
    distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
    return distance <= lengths[1] - lengths[0] if causal else distance < lengths[1]


@pytest.mark.parametrize("keys", [128, 1100])
def test_the_next_tile_is_asked_for_when_few_steps_are_left(keys, reports):
    """Three tiles: each query waits until the leader's load warp has what comes before the tile's
    last steps behind it, so that no tile is kept from clusters that have nothing to do."""
    attend((700, keys), False, config=ForwardConfig(), use_clc=True)
    waits, found = 0, []
    for entry in reports[0].trace:
        if entry.warp == ForwardConfig().warps.load and not entry.ctaid[0]:
            waits += of_entry(entry.opcode)[0] is Kind.WAIT
        if entry.opcode.startswith("clusterlaunchcontrol.try_cancel"):
            found.append(waits)
    steps = -(-keys // TILE_K)
    # A wait for each K and V, for Q and for the scheduler's response; V is a step behind.
    earliest = 2 + 2 * (max(steps - CLAIM_STEPS, 1) - 1)
    assert len(found) == 3
    for tile, waited in enumerate(found):
        assert waited - tile * (2 * steps + 2) >= earliest


# Causal with more queries than keys: tiles of none, of one and of three steps; with tiles in order,
# those without steps come first. Two equal tiles of one step. Both schedulers.
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        ((1200, 300), True, {}),
        ((1200, 300), True, {"ordered_tiles": False}),
        ((512, 100), False, {}),
        ((512, 600), False, {"s_stages": 1}),
    ],
)
def test_the_forward_does_what_its_table_says(lengths, causal, options, use_clc, reports):
    config = ForwardConfig(**options)
    seen = attend(lengths, causal, config=config, use_clc=use_clc)
    tiles = steps_of(seen, TILE_Q, TILE_K)
    if causal and config.ordered_tiles:
        tiles = tiles[::-1]
    assert not causal or {0, 1, 3} <= set(tiles)
    assert_as_declared(reports[0], config, tiles)


@pytest.mark.parametrize("ds_bytes", [0, BackwardConfig().ds_bytes], ids=["anew", "stored"])
@pytest.mark.parametrize(("lengths", "causal"), [((600, 300), True), ((300, 150), False)])
def test_the_backward_does_what_its_tables_say(lengths, causal, ds_bytes, reports):
    config = BackwardConfig(ds_bytes=ds_bytes)
    seen = attend(lengths, causal, backward=config)
    _, _, of_keys, of_queries = reports
    tiles = steps_of(seen, TILE_Q, TILE_K)
    tiles = tiles[::-1] if causal else tiles
    if not ds_bytes:
        assert_as_declared(of_keys, config.dkdv, steps_of(seen.T, TILE_K, TILE_Q))
        assert_as_declared(of_queries, config.dq, tiles)
        return
    # Tiles of 256 keys, in steps of 128 queries; those of dK and of dQ take turns.
    of_dk = steps_of(seen.T, TILE_Q, TILE_K)
    assert_as_declared(of_keys, config.dv, of_dk)
    pairs = itertools.zip_longest(of_dk, tiles)
    in_turns = tuple(tile for pair in pairs for tile in pair if tile is not None)
    assert_as_declared(of_queries, config.products, in_turns)
