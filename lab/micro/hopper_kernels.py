"""Small PTX kernels that time one thing each, for a Hopper GPU and for the timing model.

Each is one CTA whose warps run a loop between two readings of %clock64 and store the difference,
one 64-bit number per warp. They use nothing that Hopper lacks or does otherwise than Blackwell:
arithmetic, shared memory, mbarriers, named barriers and bulk copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENTRY = "measure"
#: Rounds of each loop.
ROUNDS = 64
#: Bytes of the global buffer that bulk copies read.
BUFFER = 1 << 20
DYNAMIC_SHARED = 160 << 10


@dataclass(frozen=True)
class Kernel:
    """name; warps of the CTA; the PTX; operations of a warp in one round, and what they are.

    sets: the constant of h200.json that was taken from this kernel's measurement, so that its row
    is no validation. ctas: of its only cluster.
    """

    name: str
    warps: int
    ptx: str
    operations: int
    unit: str
    sets: str = ""
    ctas: int = 1


_HEAD = """.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 pool[];
.visible .entry measure(.param .u64 results, .param .u64 buffer)
.reqntid THREADS, 1, 1
{
.reg .b64 %out, %buf, %begin, %end, %at, %state<8>;
.reg .b32 %thread, %warp, %lane, %i, %pool, %addr, %word<64>, %bytes, %parity;
.reg .f32 %f<96>;
.reg .f32 %acc<8>;
.reg .pred %more, %leader, %first, %done;
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
setp.eq.u32 %leader, %lane, 0;
setp.eq.u32 %first, %thread, 0;
ld.param.u64 %out, [results];
ld.param.u64 %buf, [buffer];
mov.u32 %pool, pool;
"""
_TAIL = """
mov.u64 %end, %clock64;
bar.sync 0, THREADS;
sub.u64 %end, %end, %begin;
mul.wide.u32 %at, %warp, 8;
add.u64 %at, %out, %at;
@%leader st.global.u64 [%at], %end;
ret;
}
"""


def _module(warps: int, setup: str, body: str, keep: str = "") -> str:
    """A kernel: setup, then ROUNDS times the body between the clocks, then `keep`.

    The barrier behind the clocks is where the timing model learns what ran before it.
    """
    loop = f"""
bar.sync 0, {32 * warps};
mov.u32 %i, {ROUNDS};
mov.u64 %begin, %clock64;
LOOP:
{body}
sub.u32 %i, %i, 1;
setp.ne.u32 %more, %i, 0;
@%more bra LOOP;
{keep}
"""
    return (_HEAD + setup + loop + _TAIL).replace("THREADS", str(32 * warps))


def _registers(count: int) -> str:
    """Set %f0 .. to small numbers that differ by lane, so that nothing is a constant."""
    lines = ["cvt.rn.f32.u32 %acc0, %lane;", "mul.f32 %acc0, %acc0, 0fBC23D70A;"]
    lines += [f"add.f32 %f{i}, %acc0, 0f{0xBD000000 + 4096 * i:08X};" for i in range(count)]
    return "\n".join(lines)


def _summed(count: int) -> str:
    """Add the registers up and store the sum where nobody looks, so that nothing is dead."""
    lines = ["mov.f32 %acc1, 0f00000000;"]
    lines += [f"add.f32 %acc1, %acc1, %f{i};" for i in range(count)]
    lines += ["setp.eq.f32 %done, %acc1, 0f7F7FFFFF;", "@%done st.global.f32 [%buf], %acc1;"]
    return "\n".join(lines)


def _exp2(warps: int) -> Kernel:
    body = "\n".join(f"ex2.approx.ftz.f32 %f{i}, %f{i};" for i in range(32))
    ptx = _module(warps, _registers(32), body, _summed(32))
    return Kernel(f"exp2, {warps} warps", warps, ptx, 32, "MUFU.EX2")


def _fma(warps: int) -> Kernel:
    # One exp2 a round: by its count the timing model sees how often ptxas goes round.
    body = "\n".join(f"fma.rn.f32 %f{i}, %f{i}, %f{i}, %acc0;" for i in range(64))
    body += "\nex2.approx.ftz.f32 %f0, %f0;"
    ptx = _module(warps, _registers(64), body, _summed(64))
    return Kernel(f"fma and an exp2, {warps} warps", warps, ptx, 64, "FFMA")


def _softmax(warps: int) -> Kernel:
    """The arithmetic of a softmax row: scale and shift, exp2, sum, maximum, conversion."""
    lines = []
    for i in range(32):
        lines.append(f"fma.rn.f32 %f{i}, %f{i}, %acc0, %acc0;")
        lines.append(f"ex2.approx.ftz.f32 %f{i}, %f{i};")
        lines.append(f"add.f32 %acc{2 + i % 4}, %acc{2 + i % 4}, %f{i};")
    for i in range(0, 32, 2):
        lines.append(f"max.f32 %acc6, %acc6, %f{i};")
        lines.append(f"cvt.rn.bf16x2.f32 %word{i // 2}, %f{i + 1}, %f{i};")
        lines.append(f"xor.b32 %word20, %word20, %word{i // 2};")
    setup = _registers(32) + "\nmov.u32 %word20, %lane;\n"
    setup += "\n".join(f"mov.f32 %acc{i}, %acc0;" for i in range(2, 7))
    keep = "\n".join(f"add.f32 %f0, %f0, %acc{i};" for i in range(2, 7))
    keep += "\ncvt.rn.f32.u32 %f1, %word20;\n" + _summed(32)
    ptx = _module(warps, setup, "\n".join(lines), keep)
    return Kernel(f"softmax mix, {warps} warps", warps, ptx, 32, "score")


def _polynomial(warps: int) -> Kernel:
    """A quarter of the exp2 as a polynomial of degree three, the rest by MUFU."""
    lines = []
    for i in range(32):
        if i % 4:
            lines.append(f"ex2.approx.ftz.f32 %f{i}, %f{i};")
            continue
        lines += [
            f"add.rm.f32 %f{32 + i}, %f{i}, 0f4B400000;",
            f"sub.f32 %f{64 + i}, %f{32 + i}, 0f4B400000;",
            f"sub.f32 %f{64 + i}, %f{i}, %f{64 + i};",
            f"fma.rn.f32 %f{i}, %f{64 + i}, 0f3D9E8000, 0f3E690000;",
            f"fma.rn.f32 %f{i}, %f{i}, %f{64 + i}, 0f3F31F000;",
            f"fma.rn.f32 %f{i}, %f{i}, %f{64 + i}, 0f3F800000;",
            f"mov.b32 %word{i}, %f{32 + i};",
            f"shl.b32 %word{i}, %word{i}, 23;",
            f"mov.b32 %word{32 + i}, %f{i};",
            f"add.s32 %word{i}, %word{i}, %word{32 + i};",
            f"mov.b32 %f{i}, %word{i};",
        ]
    ptx = _module(warps, _registers(32), "\n".join(lines), _summed(32))
    return Kernel(f"exp2, a quarter emulated, {warps} warps", warps, ptx, 32, "exp2")


def _shared_loads(warps: int) -> Kernel:
    lines = []
    for i in range(8):
        words = ", ".join(f"%word{4 * i + j}" for j in range(4))
        lines.append(f"ld.volatile.shared.v4.b32 {{{words}}}, [%addr+{512 * 16 * i}];")
    setup = "shl.b32 %addr, %thread, 4;\nadd.u32 %addr, %addr, %pool;\n"
    ptx = _module(warps, setup, "\n".join(lines))
    return Kernel(f"ld.shared.v4, {warps} warps", warps, ptx, 8, "512 bytes")


def _shared_stores(warps: int) -> Kernel:
    words = ", ".join(["%thread"] * 4)
    store = "st.volatile.shared.v4.b32"
    body = "\n".join(f"{store} [%addr+{512 * 16 * i}], {{{words}}};" for i in range(8))
    setup = "shl.b32 %addr, %thread, 4;\nadd.u32 %addr, %addr, %pool;\n"
    return Kernel(f"st.shared.v4, {warps} warps", warps, _module(warps, setup, body), 8,
                  "512 bytes")  # fmt: skip


def _named_barrier(warps: int) -> Kernel:
    body = "\n".join(f"bar.sync 1, {32 * warps};" for _ in range(4))
    ptx = _module(warps, "", body)
    return Kernel(f"bar.sync, {warps} warps", warps, ptx, 4, "barrier", "named_barrier")


_INIT = """
@%first mbarrier.init.shared.b64 [%pool], 1;
@%first mbarrier.init.shared.b64 [%pool+8], 1;
@%first fence.mbarrier_init.release.cluster;
bar.sync 0, THREADS;
mov.u32 %parity, 0;
"""


def _wait(label: str, address: str) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %done, [{address}], %parity;\n"
        f"@!%done bra {label};"
    )


def _ping_pong() -> Kernel:
    """Two warps hand a turn to and fro over two mbarriers; two hand-overs a round."""
    body = f"""
setp.eq.u32 %done, %warp, 0;
@!%done bra SECOND;
@%leader mbarrier.arrive.shared.b64 %state0, [%pool];
{_wait("WAIT_A", "%pool+8")}
bra BOTH;
SECOND:
{_wait("WAIT_B", "%pool")}
@%leader mbarrier.arrive.shared.b64 %state1, [%pool+8];
BOTH:
xor.b32 %parity, %parity, 1;
"""
    ptx = _module(2, _INIT.replace("THREADS", "64"), body)
    return Kernel("mbarrier hand-over, 2 warps", 2, ptx, 2, "hand-over")


def _bulk_load(nbytes: int) -> Kernel:
    """One warp loads a block from L2 and waits for it."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""
@%leader mbarrier.arrive.expect_tx.shared.b64 %state0, [%pool], {nbytes};
@%leader {copy} [%addr], [%buf], {nbytes}, [%pool];
{_wait("WAIT_C", "%pool")}
xor.b32 %parity, %parity, 1;
"""
    setup = _INIT.replace("THREADS", "32") + "add.u32 %addr, %pool, 1024;\n"
    sets = {1024: "tma_load_l2", 8192: "l2 rate", 32768: "l2 rate"}.get(nbytes, "")
    return Kernel(f"bulk load of {nbytes} bytes", 1, _module(1, setup, body), 1, "load", sets)


def _bulk_store(nbytes: int, until: str) -> Kernel:
    """One warp stores a block to L2 and waits until it is "read" from shared memory, or "done"."""
    suffix = ".read" if until == "read" else ""
    # Unrolled, ptxas would move a wait behind the next store.
    body = f"""
.pragma "nounroll";
@%leader cp.async.bulk.global.shared::cta.bulk_group [%buf], [%addr], {nbytes};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{suffix} 0;
"""
    setup = _INIT.replace("THREADS", "32") + "add.u32 %addr, %pool, 1024;\n"
    sets = "tma_store" if nbytes == 1024 else ""
    name = f"bulk store of {nbytes} bytes, {until}"
    return Kernel(name, 1, _module(1, setup, body), 1, "store", sets)


def _chain(name: str, body: str, sets: str) -> Kernel:
    """16 dependent instructions of one warp: the latency."""
    setup = "and.b32 %addr, %thread, 0;\nadd.u32 %addr, %addr, %pool;\n"
    setup += "@%first st.shared.b32 [%addr], %addr;\ncvt.rn.f32.u32 %f0, %lane;\n"
    setup += "xor.b32 %word0, %lane, 5;\n"
    keep = "add.u32 %addr, %addr, %word0;\ncvt.rn.f32.u32 %f1, %addr;\nadd.f32 %f0, %f0, %f1;\n"
    keep += _summed(1)
    ptx = _module(1, setup, "\n".join([body] * 16), keep)
    return Kernel(f"chain of {name}, 1 warp", 1, ptx, 16, "instruction", sets)


#: Name, bytes per lane, and the address of a lane's data in words of PTX over %lane.
_PATTERNS = (
    ("4 bytes, one address", 4, ()),
    ("4 bytes, 8 apart", 4, ("shl.b32 %addr, %lane, 3;",)),
    ("4 bytes, 128 apart", 4, ("shl.b32 %addr, %lane, 7;",)),
    ("8 bytes, in a row", 8, ("shl.b32 %addr, %lane, 3;",)),
    ("8 bytes, one address", 8, ()),
    ("8 bytes, pairs of lanes share", 8, ("shr.u32 %addr, %lane, 1;", "shl.b32 %addr, %addr, 3;")),
    ("16 bytes, one address", 16, ()),
    ("16 bytes, pairs of lanes share", 16,
     ("shr.u32 %addr, %lane, 1;", "shl.b32 %addr, %addr, 4;")),
    ("16 bytes, eight lanes share", 16,
     ("shr.u32 %addr, %lane, 3;", "shl.b32 %addr, %addr, 4;")),
    ("16 bytes, lanes 8 apart share", 16,
     ("and.b32 %addr, %lane, 7;", "shl.b32 %addr, %addr, 4;")),
    ("16 bytes, one address in a register", 16,
     ("shfl.sync.idx.b32 %addr, %thread, 0, 31, -1;", "shl.b32 %addr, %addr, 4;")),
    ("16 bytes, lanes 2 apart share", 16,
     ("and.b32 %addr, %lane, 1;", "shr.u32 %word0, %lane, 2;", "shl.b32 %word0, %word0, 1;",
      "or.b32 %addr, %addr, %word0;", "shl.b32 %addr, %addr, 4;")),
    ("16 bytes, lanes 4 apart share", 16,
     ("and.b32 %addr, %lane, 3;", "shr.u32 %word0, %lane, 3;", "shl.b32 %word0, %word0, 2;",
      "or.b32 %addr, %addr, %word0;", "shl.b32 %addr, %addr, 4;")),
    ("8 bytes, lanes 2 apart share", 8,
     ("and.b32 %addr, %lane, 1;", "shr.u32 %word0, %lane, 2;", "shl.b32 %word0, %word0, 1;",
      "or.b32 %addr, %addr, %word0;", "shl.b32 %addr, %addr, 3;")),
    ("8 bytes, lanes 16 apart share", 8, ("and.b32 %addr, %lane, 15;", "shl.b32 %addr, %addr, 3;")),
    ("16 bytes, 32 apart", 16, ("shl.b32 %addr, %lane, 5;",)),
    ("16 bytes, 128 apart", 16, ("shl.b32 %addr, %lane, 7;",)),
    ("16 bytes, 128 apart, swizzled", 16,
     ("shl.b32 %addr, %lane, 7;", "and.b32 %word0, %lane, 7;", "shl.b32 %word0, %word0, 4;",
      "add.u32 %addr, %addr, %word0;")),
)  # fmt: skip


def _pattern(name: str, width: int, address: tuple[str, ...]) -> Kernel:
    """Loads of shared memory whose lanes touch the banks in some pattern; 8 warps."""
    count = width // 4
    form = {4: "b32", 8: "v2.b32", 16: "v4.b32"}[width]
    lines = []
    for i in range(8):
        words = ", ".join(f"%word{4 * i + j}" for j in range(count))
        words = f"{{{words}}}" if count > 1 else words
        # Volatile: neither taken out of the loop nor left out.
        lines.append(f"ld.volatile.shared.{form} {words}, [%addr+{4096 * i}];")
    offset = address or ("and.b32 %addr, %thread, 0;",)
    setup = "\n".join((*offset, "add.u32 %addr, %addr, %pool;\n"))
    ptx = _module(8, setup, "\n".join(lines))
    return Kernel(f"shared loads, {name}", 8, ptx, 8, "load")


def _all() -> list[Kernel]:
    many: tuple[Callable[[int], Kernel], ...] = (
        _exp2, _fma, _softmax, _polynomial, _shared_loads, _shared_stores, _named_barrier,
    )  # fmt: skip
    found = [make(warps) for make in many for warps in (4, 8, 16)]
    found += [_pattern(*pattern) for pattern in _PATTERNS]
    found += [
        _chain("ex2", "ex2.approx.ftz.f32 %f0, %f0;", "mufu_latency"),
        _chain("ld.shared", "ld.shared.b32 %addr, [%addr];", "shared_load"),
        _chain("shfl", "shfl.sync.idx.b32 %word0, %word0, %word0, 31, -1;", "shuffle"),
        _chain("fma", "fma.rn.f32 %f0, %f0, %f0, %f0;", ""),
    ]
    found.append(_ping_pong())
    found += [_bulk_load(nbytes) for nbytes in (1024, 8192, 32768, 131072)]
    sizes, ends = (1024, 8192, 32768, 65536), ("read", "done")
    return found + [_bulk_store(nbytes, until) for nbytes in sizes for until in ends]


KERNELS = _all()
