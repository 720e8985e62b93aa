"""Waits and signals of a kernel's warps: as the simulator traces them, and as the table of steps
says."""

from __future__ import annotations

import importlib
import importlib.util
import itertools

import torch

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_with_kvcache
from fa4_hd256.kernels.blackwell.forward.mxfp8_config import Mxfp8Config
from fa4_hd256.kernels.nvfp4_format import NVFP4
from fa4_hd256.kernels.problem_class import DESCALES
from fa4_hd256.kernels.proof.programs import OperationKind, Programs
from fa4_hd256.quantize import quantize_mxfp8, quantize_nvfp4

ADDRESS_BITS = 0xFFFFFF  # of an address in the cluster: the rest is the CTA
SMEM_START = 1024  # the first 1 KiB of shared memory is the system's
#: Operations on barriers.
_SYNCHRONISING = (
    OperationKind.WAIT,
    OperationKind.ARRIVE,
    OperationKind.COPY,
    OperationKind.COMMIT,
)


def traced_launches(monkeypatch, device):
    """A list that gets the report, with a trace, of each launch that follows on a simulated
    device."""
    found, plain = [], sm100_sim.launch_packed

    def launch(*arguments, **options):
        found.append(plain(*arguments, **{**options, "trace": True}))
        return found[-1]

    monkeypatch.setattr(sm100_sim, "launch_packed", launch)
    monkeypatch.setenv("SM100_SIM_DEVICE", device)
    return found


def happened(report, plan, warp, cta):
    """Return (kind, edge, stage, parity of a wait) of a warp's waits, signals, copies and products;
    of a wait for products, how many may be under way."""
    places = [(edge.name, stage) for edge in plan.edges.edges for stage in range(edge.stages)]
    start = SMEM_START + plan.smem.offsets()["barriers"]
    found = []
    for entry in report.trace:
        if (entry.warp, entry.ctaid[0]) != (warp, cta):
            continue
        kind, operand = of_entry(entry.opcode)
        if kind in (OperationKind.PRODUCT, OperationKind.GROUP):
            found.append((kind, "", 0, None))
        elif kind is OperationKind.DONE:
            found.append((kind, "", 0, entry.operands[0]))
        elif kind is not None:
            index = ((entry.operands[operand] & ADDRESS_BITS) - start) // 8
            if 0 <= index < len(places):  # else a barrier of the scheduler
                parity = entry.operands[2] if kind is OperationKind.WAIT else None
                found.append((kind, *places[index], parity))
    return merged(found)


def merged(found):
    """Operations in a row once: a copy has several boxes, a product several instructions, an
    arrival one for each CTA, and nothing tells a product from one that follows it at once."""
    return [
        step for step, same in itertools.groupby(found)
        for _ in range(len(list(same)) if step[0] is OperationKind.GROUP else 1)
    ]  # fmt: skip


def of_entry(opcode):
    """Return (kind of an operation, its operand that is a barrier), (None, 0) for others."""
    if opcode.startswith("mbarrier.try_wait"):
        return OperationKind.WAIT, 1
    if opcode.startswith("mbarrier.arrive") and "expect_tx" not in opcode:
        return OperationKind.ARRIVE, 1
    if opcode.startswith("cp.async.bulk.tensor") and "mbarrier" in opcode:
        return OperationKind.COPY, 2
    if opcode.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
        return OperationKind.COPY, 3
    if opcode.startswith("wgmma.commit_group"):
        return OperationKind.GROUP, 0
    if opcode.startswith("wgmma.wait_group"):
        return OperationKind.DONE, 0
    if opcode.startswith("tcgen05.commit"):
        return OperationKind.COMMIT, 0
    return (OperationKind.PRODUCT, 0) if opcode.startswith("tcgen05.mma.") else (None, 0)


def declared(edges, steps, tiles, skipped=None):
    """Return the operations of each (role, CTA), from the table of steps; skipped: see
    `Programs`."""
    found = {}
    for role, program in Programs(edges, steps, tiles, skipped or {}).all().items():
        found[role] = []
        for operation in program:
            if operation.kind in (OperationKind.PRODUCT, OperationKind.GROUP):
                found[role].append((operation.kind, "", 0, None))
            elif operation.kind is OperationKind.DONE:
                found[role].append((operation.kind, "", 0, operation.number))
            elif operation.kind in _SYNCHRONISING:
                edge = edges[operation.edge]
                phase, stage = divmod(operation.number, edge.stages)
                parity = (phase - edge.initially_complete) % 2
                is_wait = operation.kind is OperationKind.WAIT
                found[role].append((operation.kind, edge.name, stage, parity if is_wait else None))
    del found["scheduler", 0]
    return found


def table_of(plan, capped=False):
    """Return the table of steps of a plan.  capped: of calls whose scores have slopes, where it has
    a table of its own."""
    of_architecture = type(plan).__module__.split(".")[:3]
    proof = importlib.import_module(".".join((*of_architecture, "proof", "plans")))
    found = proof.plans_of(plan)
    return (found[-1] if capped else found[0]).steps


def assert_as_declared(report, plan, tiles, steps=None, ctas=(0, 1)):
    """steps: a table of the plan, `table_of(plan)` if none is given.  ctas: of the cluster."""
    steps = steps or table_of(plan)
    for (role, cta), program in declared(plan.edges, steps, tiles).items():
        expected = merged(program)
        if cta not in ctas:
            continue
        for warp in first_and_last(warps_of(role, plan, steps)):
            assert happened(report, plan, warp, cta) == expected, (role, cta, warp)


def warps_of(role, plan, steps):
    """Return the warps of a role, or of a part of one."""
    for whole in steps.roles:
        if role in whole.names:
            warps = getattr(plan.warps, whole.whole)
            alike = [n for r in steps.roles if r.whole == whole.whole for n in r.names]
            if len(alike) == 1:
                return warps
            size = len(warps) // len(alike)
            first = alike.index(role) * size
            return warps[first : first + size]
    return getattr(plan.warps, role)


def first_and_last(warps):
    return (warps[0], warps[-1]) if isinstance(warps, tuple) else (warps,)


def steps_of(seen, rows, columns):
    """Count, for each block of rows, the blocks of columns that any of them sees."""
    return tuple(
        sum(
            bool(seen[first : first + rows, begin : begin + columns].any())
            for begin in range(0, seen.shape[1], columns)
        )
        for first in range(0, seen.shape[0], rows)
    )


def attend(
    lengths, causal, backward=None, kv_dtype=torch.bfloat16, q_dtype=torch.bfloat16, **options
):
    """Attention of one head, and its gradients where a configuration for them is given; returns
    which keys each query sees."""
    q, k, v = _inputs(lengths, backward is not None)
    if backward is not None:
        options["backward_config"] = backward
    q = q.to(q_dtype)
    if kv_dtype != NVFP4:
        k, v = k.to(kv_dtype), v.to(kv_dtype)
    if isinstance(options.get("config"), Mxfp8Config):
        q, k, v, *scales = quantize_mxfp8(q, k, v)
        options |= dict(zip(DESCALES, scales))
    options |= {"causal": causal, "num_splits": 1}
    if kv_dtype == NVFP4:
        (k, k_scale), (v, v_scale) = map(quantize_nvfp4, (k, v))
        flash_attn_with_kvcache(q, k, v, k_block_scale=k_scale, v_block_scale=v_scale, **options)
        return _seen(lengths, causal)
    out = flash_attn_func(q, k, v, **options)
    if backward is not None:
        out.backward(torch.randn_like(out))
    return _seen(lengths, causal)


def _inputs(lengths, requires_grad):
    torch.manual_seed(0)
    return [
        torch.randn(1, length, 1, 256).bfloat16().requires_grad_(requires_grad)
        for length in (lengths[0], lengths[1], lengths[1])
    ]


def _seen(lengths, causal):
    distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
    return distance <= lengths[1] - lengths[0] if causal else distance < lengths[1]
