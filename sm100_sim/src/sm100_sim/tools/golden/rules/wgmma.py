"""Golden cases of what is required of those who execute a wgmma, and of its descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cases import Case
from ..instructions import wgmma

_GROUP = "a wgmma is executed by all four warps of a warpgroup"
_SAME = "warps of a warpgroup give a wgmma the same descriptors and scale-d"
_ADDRESS = "a swizzle goes by bits of the address; other bits of a descriptor have no meaning"
_BASE = "bits 49-51 of a descriptor, the base offset, are 0 for a start that fits the swizzle"
_BEHIND = "the last rows lie behind the CTA's shared memory"
_PREPARED = "shr.u32 %wp, %thread, 5;\nand.b32 %ln, %thread, 31;\n"
_A, _B, _SCALE = "add.u64 %da, %a, 0;", "add.u64 %db, %b, 0;", "setp.ne.u32 %sum, 0, 0;"


def cases() -> Iterator[Case]:
    """All cases of this module."""
    kernel = _Kernel()
    yield from _who(kernel)
    yield from _uniform(kernel)
    yield from _descriptors(kernel)


class _Kernel:
    """The product m64n16k16 of bf16 from zero, in parts: what comes before wgmma.fence, what
    follows up to the wait, the rest. %wp is the warp, %ln the lane."""

    def __init__(self) -> None:
        self.case = wgmma.case_of(wgmma.Product("f32", ("bf16", "bf16"), 16, 1))
        ptx = self.case.ptx
        begin, end = ptx.index("wgmma.fence"), ptx.index("ld.param.u64 %rd1, [p3]")
        declared = ".reg .pred %sum, %sk, %q;\n.reg .b32 %wp, %ln;"
        self.head = ptx[:begin].replace(".reg .pred %sum;", declared)
        self.middle, self.tail = ptx[begin:end], ptx[end:]

    def with_(self, middle: str, name: str, rule: str, **changed) -> Case:
        """A case with another middle part. changed: further fields; head, of the text."""
        ptx = changed.pop("head", self.head) + middle + changed.pop("tail", self.tail)
        return replace(self.case, name=f"wgmma/rules/{name}", ptx=ptx, rule=rule, hashed=False,
                       **changed)  # fmt: skip

    def except_where(self, condition: str) -> str:
        """The middle part but for the threads in which `condition` sets %sk."""
        return f"{_PREPARED}{condition}\n@%sk bra SKIP;\n{self.middle}SKIP:\n"

    def replaced(self, old: str, new: str) -> str:
        return self.middle.replace(old, new)


def _who(kernel: _Kernel) -> Iterator[Case]:
    yield kernel.with_(kernel.middle, "plain", _GROUP)
    for name, condition in (("three of four warps", "setp.eq.u32 %sk, %wp, 3;"),
                            ("two of four warps", "setp.ge.u32 %sk, %wp, 2;"),
                            ("first warp alone", "setp.ne.u32 %sk, %wp, 0;"),
                            ("last warp alone", "setp.ne.u32 %sk, %wp, 3;")):  # fmt: skip
        yield kernel.with_(kernel.except_where(condition), name, _GROUP)
    late = (f"{_PREPARED}setp.ne.u32 %sk, %wp, 2;\n@%sk bra SKIP;\n"
            + "nanosleep.u32 100000;\n" * 4 + "SKIP:\n" + kernel.middle)  # fmt: skip
    yield kernel.with_(late, "one warp late", _GROUP)
    three = kernel.head.replace(".reqntid 128", ".reqntid 96")
    yield kernel.with_(kernel.middle, "three warps", _GROUP, head=three, block=96)
    # Eight warps that are renumbered: the four in the middle are thread 0 to 127.
    eight = kernel.head.replace(".reqntid 128", ".reqntid 256").replace(
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %thread, %tid.x;\nadd.u32 %thread, %thread, 64;\nand.b32 %thread, %thread, 127;\n"
        "mov.u32 %s, %tid.x;\nshr.u32 %wp, %s, 5;",
    )
    middle = ("setp.lt.u32 %sk, %wp, 2;\n@%sk bra SKIP;\nsetp.ge.u32 %sk, %wp, 6;\n@%sk bra SKIP;\n"
              + kernel.middle)  # fmt: skip
    yield kernel.with_(middle, "warps 2 to 5", _GROUP, head=eight, block=256,
                       tail=kernel.tail.replace("ret;", "SKIP:\nret;"))  # fmt: skip
    yield kernel.with_(kernel.except_where("setp.ge.u32 %sk, %ln, 16;"), "half of the lanes",
                       _GROUP, undefined=_GROUP)  # fmt: skip


def _uniform(kernel: _Kernel) -> Iterator[Case]:
    for name, condition in (
        ("scale-d differs between warps", "setp.lt.u32 %sum, %wp, 2;"),
        ("scale-d differs in a warp", "setp.lt.u32 %sum, %ln, 16;"),
        ("scale-d differs in a warp, other half", "setp.ge.u32 %sum, %ln, 16;"),
    ):
        yield kernel.with_(_PREPARED + kernel.replaced(_SCALE, condition), name, _SAME,
                           undefined=_SAME)  # fmt: skip
    for name, old, by in (("B differs between warps", _B, "shr.u32 %s, %wp, 1;"),
                          ("A differs between warps", _A, "shr.u32 %s, %wp, 1;"),
                          ("B differs in a warp", _B, "shr.u32 %s, %ln, 4;")):  # fmt: skip
        new = f"{by}\nshl.b32 %s, %s, 1;\ncvt.u64.u32 %rd1, %s;\n{old.replace(' 0;', ' %rd1;')}"
        yield kernel.with_(_PREPARED + kernel.replaced(old, new), name, _SAME, undefined=_SAME)


def _descriptors(kernel: _Kernel) -> Iterator[Case]:
    for bit in (14, 15, 30, 31, 46, 48, 52, 61):
        middle = kernel.replaced(_B, f"or.b64 %db, %b, {1 << bit:#x};")
        middle = middle.replace(_A, f"or.b64 %da, %a, {1 << bit:#x};")
        yield kernel.with_(middle, f"bit {bit}", _ADDRESS)
    for rows in (1, 2, 4, 7):
        middle = kernel.replaced(_A, f"add.u64 %da, %a, {8 * rows};")
        yield kernel.with_(middle, f"start {rows} rows on", _ADDRESS, undefined=_BEHIND)
        middle = kernel.replaced(_A, f"or.b64 %da, %a, {rows << 49:#x};")
        yield kernel.with_(middle, f"base offset {rows}", _BASE, undefined=_BASE)
    for leading in (0, 2, 64):
        middle = kernel.replaced(_A, "and.b64 %da, %a, 0xFFFFFFFF0000FFFF;\n"
                                 f"or.b64 %da, %da, {leading << 16:#x};")  # fmt: skip
        yield kernel.with_(middle, f"leading {leading}", _ADDRESS)
