"""Machine code of the kernels: registers of the roles within their budgets, no spills, and loops in
which tensor cores and arithmetic overlap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.architectures import named
from fa4_hd256.kernels.blackwell.backward.config import BackwardWarpPlan
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3, DECODE_NVFP4
from fa4_hd256.kernels.blackwell.forward.config import ForwardWarpPlan
from fa4_hd256.kernels.hopper import architecture as hopper
from fa4_hd256.kernels.hopper.backward.config import BackwardConfig as HopperBackward
from fa4_hd256.kernels.hopper.decode.config import DECODE_E4M3 as HOPPER_DECODE_E4M3
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig as HopperForward
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.mask.masking import MaskKind
from fa4_hd256.kernels.plan.budgets import RegisterPlan
from fa4_hd256.kernels.problem_class import (
    E4M3,
    OF_PAGES,
    OF_SEQUENCES,
    GradientClass,
    ProblemClass,
)
from fa4_hd256.kernels.small.append_rows import AppendClass, RotaryClass
from fa4_hd256.kernels.small.backward_preprocess import PreprocessClass, PreprocessConfig
from fa4_hd256.kernels.small.backward_sum import SumConfig
from fa4_hd256.kernels.small.combine_config import CombineClass
from fa4_hd256.kernels.small.tail_rows import TailClass, TailConfig
from fa4_hd256.run.catalogue import KernelSpec, append_spec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.resources import resource_usage
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from sm100_sim.host.cubin import launch_registers
from sm100_sim.timing.machine_code.sass import SassFunction, disassemble

pytestmark = pytest.mark.simulator

BF16, PACKED = torch.bfloat16, ("cu_seqlens_q", "cu_seqlens_k")
FULL, CAUSAL = ProblemClass(BF16), ProblemClass(BF16, bounded_right=True)
WINDOW = replace(CAUSAL, bounded_left=True)
HOPPER = named("sm_90a")


def hopper_spec(kind: str, config: Any, problem_class: Any) -> KernelSpec:
    return KernelSpec(kind, config, problem_class, HOPPER)


def of_blackwell() -> dict[str, KernelSpec]:
    """Kernels of Blackwell with tensor cores, of the calls that take most registers."""
    forwards = {
        "full": FULL,
        "causal, fp16": ProblemClass(torch.float16, bounded_right=True),
        "window": WINDOW,
        "softcap, sink": replace(FULL, negative_scale=True, softcap=True, sink=True),
        "packed, clc": replace(CAUSAL, ragged=PACKED, use_clc=True, packed_heads=2),
        "packed, window": replace(WINDOW, sink=True, ragged=PACKED, packed_heads=8),
        "split, clc": replace(FULL, use_clc=True, packed_heads=8, split=True),
        "split, window": replace(WINDOW, sink=True, split=True),
    }
    found = {f"forward, {name}": KernelSpec("forward", ForwardConfig(), one)
             for name, one in forwards.items()}  # fmt: skip
    mixed = ForwardConfig(ex2_pattern=Ex2Pattern(4, 3))
    found["forward, mixed"] = KernelSpec("forward", mixed, FULL)
    capped = replace(WINDOW, dtype=torch.float16, softcap=True, ragged=PACKED)
    backwards = {
        "causal": CAUSAL,
        "packed": replace(CAUSAL, ragged=PACKED),
        "packed, clc": replace(CAUSAL, ragged=PACKED, use_clc=True),
        "capped": replace(capped, negative_scale=True),
        "capped, used": replace(capped, ragged=(*PACKED, "seqused_q", "seqused_k")),
    }
    for kind in ("dq", "dkdv", "dv", "products"):
        config = BackwardConfig().of_kernel(f"backward_{kind}")
        for name, one in backwards.items():
            # Parts of a group, but of dQ, which has none.
            own = GradientClass(one, partial=kind != "dq")
            found[f"{kind}, {name}"] = KernelSpec(f"backward_{kind}", config, own)
    heads = {16: 16, 32: 16, 64: 6}
    for config in (*DECODE, *DECODE_E4M3, *DECODE_NVFP4):
        tiles, rows = config.tiles, config.rows
        own = replace(WINDOW, packed_heads=heads[rows], split=True, kv_dtype=tiles.kv_dtype)
        found[f"{tiles.kind}, {rows}"] = KernelSpec(tiles.kind, config, own)
    return found


def of_hopper() -> dict[str, KernelSpec]:
    """Kernels of Hopper with tensor cores."""
    everything = replace(
        WINDOW, negative_scale=True, softcap=True, sink=True, packed_heads=8, use_clc=True,
        ragged=PACKED,
    )  # fmt: skip
    short = HopperForward(block_kv=64)
    found = {
        "Hopper, long": hopper_spec("forward", HopperForward(), FULL),
        "Hopper, window": hopper_spec("forward", short, WINDOW),
        "Hopper, everything": hopper_spec("forward", short, everything),
        "Hopper, long, everything": hopper_spec("forward", HopperForward(), everything),
        "Hopper, pair": hopper_spec("forward", HopperForward(ctas=2), WINDOW),
    }
    causal = replace(CAUSAL, use_clc=True)
    classes = {
        "full": FULL,
        "packed": replace(causal, bounded_left=True, ragged=PACKED),
        "capped": replace(WINDOW, softcap=True, negative_scale=True),
    }
    for kind in ("dv", "products", "single_dq", "single_dk", "single_dv"):
        config = HopperBackward().of_kernel(f"backward_{kind}")
        for name, one in classes.items():
            # The products of a stored dS have no scores.
            if (kind, name) != ("products", "capped"):
                own = GradientClass(one)
                found[f"Hopper, {kind}, {name}"] = hopper_spec(f"backward_{kind}", config, own)
    pages = replace(
        WINDOW, kv_dtype=E4M3, softcap=True, sink=True, use_clc=True, split=True, page_size=16,
        descale=OF_PAGES, ragged=("cu_seqlens_q", "seqused_k", "page_table"),
    )  # fmt: skip
    for config in HOPPER_DECODE_E4M3:
        own = replace(pages, packed_heads=config.rows // 2)
        found[f"Hopper, e4m3, {config.rows}"] = hopper_spec("forward_decode_e4m3", config, own)
    queries = replace(causal, q_dtype=E4M3, kv_dtype=E4M3, packed_heads=2, descale=OF_SEQUENCES)
    for name, config in (("in kernel", hopper.E4M3), ("before", hopper.E4M3_COLUMNS)):
        found[f"Hopper, e4m3, V^T {name}"] = hopper_spec("forward_e4m3", config, queries)
    return found


KERNELS = of_blackwell() | of_hopper()
#: Kernels without tensor cores, and the registers of a thread that let an SM have as many warps as
#: they are launched with.
SMALL = {
    "sum": (KernelSpec("backward_sum", SumConfig(), BF16), 40),
    "tail": (
        KernelSpec(
            "tail_rows", TailConfig(),
            TailClass(("q", "k", "k"), ("q", "k"), ds=MaskKind(bounded_right=True)),
        ), 40,
    ),
    "preprocess": (
        KernelSpec("backward_preprocess", PreprocessConfig(), PreprocessClass(BF16), HOPPER), 40,
    ),
    "combine": (
        KernelSpec("forward_combine", kernels_of(named("sm_100a")).combine.of(4, 32),
                   CombineClass(BF16)), 64,
    ),
    "combine, 64": (
        KernelSpec("forward_combine", kernels_of(HOPPER).combine.of(64, 4096),
                   CombineClass(torch.float16), HOPPER), 64,
    ),
    "append": (append_spec(AppendClass(BF16, False, True, E4M3, OF_PAGES), named("sm_100a")), 48),
    "append, rotary": (
        append_spec(
            AppendClass(BF16, True, True, E4M3, OF_PAGES,
                        RotaryClass(torch.float32, False, ordered=True, packed=True)), HOPPER
        ), 255,
    ),
}  # fmt: skip


def code_of(name: str) -> tuple[Any, SassFunction]:
    """Return (kernel, its function with most instructions: V may be transposed by another)."""
    kernel = compile_kernel(KERNELS[name])
    functions = disassemble(kernel.cubin).values()
    return kernel, max(functions, key=lambda one: len(one.instructions))


REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
#: Registers of a tcgen05.ld or st, which names the first of them.
TMEM_WIDTH = re.compile(r"(?:LDTM|STTM)\.x(\d+)")


def beyond(function: SassFunction, start: int, budget: int) -> list[str]:
    """Instructions after number `start` on any path that name a register the budget lacks."""
    found, seen = [], set()
    first = function.block_of[start]
    pending = [(first, start + 1)]
    while pending:
        index, begin = pending.pop()
        block = function.blocks[index]
        for instruction in function.instructions[begin : block.stop]:
            own = [int(number) for number in REGISTER.findall(instruction.operands)]
            width = TMEM_WIDTH.match(instruction.opcode)
            if own and max(own) + (int(width[1]) if width else 1) > budget:
                found.append(instruction.text)
        for successor in block.successors:
            if successor not in seen:
                seen.add(successor)
                pending.append((successor, function.blocks[successor].start))
    return found


def plan_of(spec: KernelSpec) -> RegisterPlan:
    config = spec.config
    return getattr(config, "plan", config).warps.registers


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled(
    "forward, packed, clc", "products, packed", "Hopper, everything", "Hopper, dv, packed",
    "Hopper, e4m3, V^T before",
)  # fmt: skip
def test_roles_have_their_registers(name):
    """The launch has the registers of the plan, nothing is spilled, and behind each setmaxnreg no
    path names a register that the budget lacks."""
    kernel, function = code_of(name)
    plan, usage = plan_of(KERNELS[name]), resource_usage(kernel.cubin)
    launched, wanted = launch_registers(kernel.cubin).values(), {b for _, b in plan.budgets}
    assert usage.stack == usage.local == 0
    if wanted == {plan.at_launch}:
        # No role gives any back, and ptxas takes what it needs.
        assert max(launched) <= plan.at_launch
        assert all(one.base != "USETMAXREG" for one in function.instructions)
        return
    assert plan.at_launch in launched
    budgets = []
    for number, instruction in enumerate(function.instructions):
        if instruction.base == "USETMAXREG":
            budgets.append(int(re.search(r"0x[0-9a-f]+", instruction.operands)[0], 16))
            assert beyond(function, number, budgets[-1]) == []
            # The check can fail: no role does with two.
            assert beyond(function, number, 2) != []
    assert set(budgets) == wanted


@pytest.mark.parametrize(("spec", "most"), SMALL.values(), ids=SMALL)
@pytest.mark.sampled("sum", "tail", "preprocess", "combine", "append")
def test_small_kernels_keep_their_values_in_registers(spec, most):
    usage = resource_usage(compile_kernel(spec).cubin)
    assert usage.stack == usage.local == 0 and usage.registers <= most


@pytest.mark.parametrize("plan", [ForwardWarpPlan, BackwardWarpPlan])
def test_a_plan_that_the_launch_cannot_serve_is_refused(plan):
    """One granule decides: 64 for the third warpgroup of the backward has hung on no GPU yet, 504 +
    8 registers per thread of three have on an H200."""
    other = plan().registers_other
    plan(registers_other=other - 8)
    with pytest.raises(ValueError, match=r"launched with 64512 \(168 each\)"):
        plan(registers_other=other + 8)


# ------------------------------------------------------------------------------- overlap


def letters(instructions: Iterable[Any], letter_of: Mapping[str, str]) -> str:
    """Return a letter for each instruction whose opcode begins like a key of `letter_of`, in
    order."""
    return "".join(
        next((letter for start, letter in letter_of.items() if i.opcode.startswith(start)), "")
        for i in instructions
    )


#: A step of Blackwell's softmax: two stores, exponentials of the third fragment, only then the wait
#: for the stores (NOTE [stores hidden by exponentials]), the signal, and the same for the second
#: half.
STEP = re.compile("Sx+Sx{24,}Wx*Ax*Sx*SWA")
LETTERS = {"STTM": "S", "MUFU.EX2": "x", "FENCE.VIEW.ASYNC.T": "W", "SYNCS.ARRIVE.TRANS64.RED": "A"}


def test_stores_of_the_first_half_of_p_are_hidden_by_exponentials():
    """Stores are hidden in both loops, with a mask and without; ptxas orders arithmetic as it
    likes."""
    kernel = compile_kernel(KernelSpec("forward", ForwardConfig(), CAUSAL))
    (function,) = disassemble(kernel.cubin).values()
    opcodes = [i.opcode for i in function.instructions]
    end = [n for n, opcode in enumerate(opcodes) if opcode.startswith("USETMAXREG")][1]
    softmax = letters(function.instructions[:end], LETTERS)
    assert len(STEP.findall(softmax)) == 2, softmax
    # Such as they would be with the wait where the stores are.
    assert not STEP.findall(re.sub("(x+)W", r"W\1", softmax))


#: Letters of wgmma kernels: the MMA into 256 columns and others, their fence and wait,
#: exponentials, the wait for a barrier, stores.
WGMMA_LETTERS = {
    "HGMMA.64x256": "O", "HGMMA": "S", "WARPGROUP.ARRIVE": "F", "WARPGROUP.DEPBAR": "W",
    "MUFU.EX2": "x", "SYNCS.PHASECHK": "b", "STG": "s",
}  # fmt: skip
#: A step of Hopper's forward: all of QK and of PV in a row, a wait that leaves PV in flight,
#: exponentials and the barrier of the next V, and only then the wait for PV.
FORWARD_STEP = re.compile("FS{16}b?F?O+W([xb]*)W")
#: A step of dV: three products in a row; dS to memory before the wait for S, exponentials before
#: that for dV.
DV_STEP = re.compile("FS{16}b?FS{16}b?FO{4}W(?:[sb]*)W([xb]*)W")
#: The last step of a tile of dV, with S of the next tile: K and Q of that are waited for behind dP.
DV_LAST_STEP = re.compile("FS{16}bbFS{16}b?FO{4}W(?:[sb]*)W([xb]*)W")
#: One gradient by itself: S, dP (not for dV) and the sum, then exponentials before the wait for it.
SINGLE_STEP = re.compile("FS{16}b*(?:FS{16}b*)?FO{4}W([xb]*)W")
#: Kernel -> a step, and the exponentials that hide in each loop at least.
OVERLAPS = {
    **{f"Hopper, {name}": (FORWARD_STEP, loops, 0.75 * keys / 2) for name, loops, keys in (
        ("long", 2, 80), ("window", 3, 64), ("everything", 3, 64), ("long, everything", 3, 80),
        ("pair", 3, 80),
    )},
    **{f"Hopper, dv, {name}": (DV_STEP, 1, 31) for name in ("full", "packed")},
    **{f"Hopper, single_{result}, full": (SINGLE_STEP, 1, 31) for result in ("dq", "dk", "dv")},
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.sampled("Hopper, everything", "Hopper, dv, packed")
def test_products_stay_in_flight_and_hide_the_exponentials(name):
    """ptxas puts a wait behind every product where registers do not suffice, and moves exponentials
    behind the wait for the product that hides them."""
    step, loops, most = OVERLAPS[name]
    code = letters(code_of(name)[1].instructions, WGMMA_LETTERS)
    hidden = [between.count("x") for between in step.findall(code)]
    assert len(hidden) == loops and min(hidden) > most, code
    # Such as they would be.
    assert step.findall(code.replace("SS", "SWS")) == []


@pytest.mark.parametrize("name", ["Hopper, dv, full", "Hopper, dv, packed"])
@pytest.mark.sampled("Hopper, dv, packed")
def test_products_of_two_tiles_stay_in_flight_together(name):
    """dV of a tile's last step hides the exponentials of the next tile; ptxas leaves two of 32."""
    code = letters(code_of(name)[1].instructions, WGMMA_LETTERS)
    (between,) = DV_LAST_STEP.findall(code)
    assert between.count("x") >= 30, code


#: Kernel in e4m3 -> MMAs, and groups of them that are under way together.
GROUPS = {
    # QK of a first step, QK and PV of a step in each of two loops, PV of the last.
    "Hopper, e4m3, V^T before": ("QGMMA", 8 + 2 * 12 + 4, 4),
    # Groups of four parts of QK, and of PV, in each of three loops.
    **{f"Hopper, e4m3, {c.rows}": ("HGMMA", 32 * 3, 5 * 3) for c in HOPPER_DECODE_E4M3},
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.sampled("Hopper, e4m3, V^T before")
def test_products_in_e4m3_are_under_way_together(name):
    """ptxas fences and awaits each MMA by itself where registers do not suffice."""
    mma, count, groups = GROUPS[name]
    opcodes = [i.opcode for i in code_of(name)[1].instructions]
    assert sum(opcode.split(".")[0] == mma for opcode in opcodes) == count
    assert sum(opcode.startswith("WARPGROUP.ARRIVE") for opcode in opcodes) == groups
