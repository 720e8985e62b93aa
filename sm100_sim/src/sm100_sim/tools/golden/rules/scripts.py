"""Golden kernels in which each warp works through a script of its own, and counts its steps.

Row `CTA` of the only output has for warp w of the CTA, at words 8 w and up, how many times each of
its steps was passed; words from 128 on are for what a step finds out. A kernel that hangs leaves
its counts, too: they say who came how far.
"""

from __future__ import annotations

import zlib

import numpy as np

from ..cases import HEADER, Case
from ..ptx_text import declare

WORDS = 256
#: First word of a row that steps use as they like (`store`).
FREE = 128
STEPS = 8
#: A step that ends the warp.
EXIT = "ret;"
#: Others get their turn: in the simulator one of these is enough, on hardware they last 0.4 ms.
SLEEP = "\n".join(["nanosleep.u32 100000;"] * 4)
#: All threads of the CTA meet, and all of the cluster.
MEET = "bar.sync 0;"
MEET_CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"

_REGISTERS = (
    ".reg .b32 %t, %w, %lane, %rank, %who, %cta, %peer, %near, %far, %n;\n.reg .b32 %r<24>;\n"
    ".reg .b64 %rd<12>, %out, %state;\n.reg .pred %counts, %skip, %p<6>, %done, %first;\n"
)


def when(left: str, comparison: str, right: str | int, body: str) -> str:
    """PTX that executes `body` in the threads for which the comparison (of .u32) holds."""
    label = f"PAST_{zlib.crc32(f'{left} {comparison} {right} {body}'.encode()):08x}"
    opposite = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt"}[comparison]
    return f"setp.{opposite}.u32 %skip, {left}, {right};\n@%skip bra {label};\n{body}\n{label}:\n"


def store(word: int, register: str) -> str:
    """PTX that stores a register in word FREE + `word` of the CTA's row."""
    return f"st.global.u32 [%out+{4 * (FREE + word)}], {register};"


def peer_address(symbol: str, register: str = "%far") -> str:
    """PTX: the shared address of `symbol` in the other CTA of a cluster of two."""
    return f"mov.u32 {register}, {symbol};\nmapa.shared::cluster.u32 {register}, {register}, %peer;"


def asked(word: int, barrier: str = "bar", parity: int = 0) -> str:
    """PTX that asks a barrier up to 1,000 times, some 4 ms, whether a phase is complete, and stores
    the answer: the kernel ends in either case."""
    label = f"ASK_{word}"
    return (
        f"mov.u32 %n, 0;\n{label}:\n"
        f"mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 %done, [{barrier}], {parity};\n"
        "selp.u32 %r20, 1, 0, %done;\nadd.u32 %n, %n, 1;\nnanosleep.u32 4000;\n"
        f"setp.lt.and.u32 %p5, %n, 1000, !%done;\n@%p5 bra {label};\n{store(word, '%r20')}"
    )


def script_ptx(
    scripts: dict[int, list[str]],
    *,
    block: int,
    directives: str = "",
    shared: str = "",
    cluster: int = 1,
    maps: int = 0,
    start: str = "",
    end: str = "",
) -> str:
    """The module of a kernel whose warp number w of the cluster executes the steps `scripts[w]`.

    w counts on over the CTAs of a cluster. Every step is PTX text. `start`, `end`: executed by all
    threads before and after. shared: declarations. The names `%lane`, `%rank` (in the cluster),
    `%peer`, `%out` and the registers of this module are there to be used.
    """
    warps = -(-block // 32)
    body = []
    for warp, steps in sorted(scripts.items()):
        parts = []
        for step, text in enumerate(steps):
            parts.append(
                f"{text}\n@%counts red.global.add.u32 "
                f"[%out+{4 * (STEPS * (warp % warps) + step)}], 1;"
            )
        body.append(when("%who", "eq", warp, "\n".join(parts)))
    cluster_text = f".reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    return (
        f"{HEADER}{declare(0, 1, maps)}\n{directives} {cluster_text}\n{{\n{shared}{_REGISTERS}"
        "mov.u32 %t, %tid.x;\nshr.u32 %w, %t, 5;\nand.b32 %lane, %t, 31;\n"
        "setp.eq.u32 %counts, %lane, 31;\nmov.u32 %rank, %cluster_ctarank;\n"
        f"xor.b32 %peer, %rank, 1;\nmad.lo.u32 %who, %rank, {warps}, %w;\nmov.u32 %cta, %ctaid.x;\n"
        f"ld.param.u64 %out, [p0];\nmul.wide.u32 %rd0, %cta, {4 * WORDS};\n"
        f"add.u64 %out, %out, %rd0;\n{start}\n{''.join(body)}{end}\nret;\n}}\n"
    )


def scripted(
    name: str,
    rule: str,
    scripts: dict[int, list[str]],
    *,
    block: int = 128,
    grid: int = 1,
    cluster: int = 1,
    undefined: str = "",
    dynamic_smem: int = 0,
    **module,
) -> Case:
    """A case of the group "rules"; `module`: further arguments of `script_ptx`."""
    ptx = script_ptx(scripts, block=block, cluster=cluster, **module)
    return Case(
        f"rules/{name}", "rules", ptx, (), (np.zeros((grid, WORDS), np.uint32),), (), grid, block,
        cluster, rule=rule, undefined=undefined, dynamic_smem=dynamic_smem,
    )  # fmt: skip
