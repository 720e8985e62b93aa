"""Family of copies: tensor copies at random boxes, strides and places; bulk copies; cp.async.

Each piece is one copy between a buffer of its own and the tile in shared memory, waited for by all
threads. At the end every CTA dumps its tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sm100_sim.state.tensormap import TensorMap, TensorMapError, validate
from sm100_sim.tools.golden.instructions.tma import REGISTERS, dump, shared

from .program import Launch, Piece, Program, Writer, random_words, writer

THREADS = 128
TILE = 16384
_BITS = {
    "u8": 8, "u16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "f16": 16, "bf16": 16,
    "f32": 32, "f32.ftz": 32, "f64": 64,
}  # fmt: skip
_FLOATING = ("f16", "bf16", "f32", "f32.ftz", "f64")
_REDUCTIONS = {
    "u32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max", "and", "or", "xor"),
    "s64": ("min", "max"),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
    "f32": ("add",),
}
_BULK_REDUCTIONS = (
    *(f"{name}.{kind}" for name in ("add", "min", "max") for kind in ("u32", "s32", "u64")),
    *(f"{name}.{kind}" for name in ("and", "or", "xor") for kind in ("b32", "b64")),
    "inc.u32", "dec.u32", "add.f32",
    "add.noftz.f16", "add.noftz.bf16", "min.f16", "max.bf16",
)  # fmt: skip


@dataclass
class _Buffers:
    """Buffers and descriptors of a program; text names them before their numbers are known."""

    inputs: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    maps: list[tuple[bool, int, TensorMap]] = field(default_factory=list)

    def add(self, words: np.ndarray, written: bool) -> int:
        """Number of a new buffer among the inputs or the outputs."""
        where = self.outputs if written else self.inputs
        where.append(words)
        return len(where) - 1

    def name(self, written: bool, number: int) -> str:
        """Return the placeholder of a buffer's parameter until `resolve`."""
        return f"<{'out' if written else 'in'}{number}>"

    def resolve(self, text: str) -> str:
        """Text with the parameters' names; inputs come first."""
        for number in range(len(self.outputs)):
            text = text.replace(f"<out{number}>", f"p{len(self.inputs) + number}")
        for number in range(len(self.inputs)):
            text = text.replace(f"<in{number}>", f"p{number}")
        return text


class Copies:
    """Writes copies for a cluster of `size` CTAs."""

    def __init__(self, w: Writer, size: int) -> None:
        self.w, self.size, self.buffers, self.barriers = w, size, _Buffers(), 0

    def piece(self) -> Piece:
        kinds = (
            [self._tensor_load] * 4
            + [self._tensor_store] * 3
            + [
                self._tensor_reduction,
                self._bulk_load,
                self._bulk_store,
                self._bulk_reduction,
                self._cp_async,
            ]
        )
        if self.size > 1:
            kinds += [self._multicast] * 6
        sync = self.sync()
        return Piece(f"{self.w.random.choice(kinds)()}{sync}")

    def sync(self) -> str:
        """A barrier of all threads that may touch a tile."""
        if self.size == 1:
            return "bar.sync 0;\n"
        return "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"

    def descriptor(self, loads: bool) -> TensorMap:
        """A descriptor that the driver takes, of a tensor of at most 64 KiB; its box fits half a
        tile."""
        while True:
            found = self._descriptor(loads)
            try:
                validate(found)
            except TensorMapError:
                continue
            if found.extent()[1] <= 65536 and 2 * found.shared_bytes <= TILE:
                return found

    def _descriptor(self, loads: bool) -> TensorMap:
        choose = self.w.random
        rank = choose.randrange(1, 6)
        dtype = choose.choice(tuple(_BITS))
        bits = _BITS[dtype]
        swizzle = choose.choice((0, 0, 32, 64, 128))
        unit = 128 // bits
        inner = unit * choose.randrange(1, (swizzle or 96) // 16 + 1)
        most = max(2, round(2000 ** (1 / rank)))
        box = (inner, *(choose.randrange(1, max(2, most // 2) + 1) for _ in range(rank - 1)))
        sizes = [choose.randrange(1, 2 * inner + 5)]
        sizes += [choose.randrange(1, most + 3) for _ in range(rank - 1)]
        steps = [choose.choice((1, 1, 1, 2, 3, 8)) for _ in range(rank)]
        strides, pitch = [], -(-sizes[0] * bits // 8 // 16) * 16 + 16 * choose.choice((0, 0, 1, 3))
        for size in sizes[1:]:
            strides.append(pitch)
            pitch = pitch * size + 16 * choose.choice((0, 0, 0, 2))
        if loads and self.w.chance(0.15):
            choose.shuffle(strides)
        if loads and strides and self.w.chance(0.1):
            strides[choose.randrange(len(strides))] = 0
        fill = dtype in _FLOATING and self.w.chance(0.4)
        return TensorMap(
            0, dtype, tuple(sizes), tuple(strides), box, tuple(steps), swizzle, 0, fill and loads,
            dtype in ("f32", "f32.ftz") and self.w.chance(0.2), 0, 0,
        )  # fmt: skip

    def _coordinates(self, t: TensorMap, loads: bool) -> str:
        choose, places = self.w.random, []
        for d, (size, box) in enumerate(zip(t.sizes, t.box, strict=True)):
            drawn = choose.randrange(-box - 3, size + 4), choose.randrange(size)
            place = choose.choice((0, size - box, size - 1, *drawn, -(box // 2)))
            if d == 0:
                # The hardware takes no tile that starts off a 16-byte boundary of its row.
                place = place // (128 // t.element_bits) * (128 // t.element_bits)
            places.append(place if loads else max(0, place))
        return f"{{{', '.join(map(str, places))}}}"

    def _map(self, t: TensorMap, written: bool) -> str:
        """Text that puts the address of a descriptor into %rd6."""
        words = self._contents(t.dtype, -(-t.extent()[1] // 128) * 32)
        number = self.buffers.add(words, written)
        self.buffers.maps.append((written, number, t))
        return f"mov.b64 %rd6, t{len(self.buffers.maps) - 1};\ncvta.param.u64 %rd6, %rd6;\n"

    def _contents(self, dtype: str, count: int) -> np.ndarray:
        words = random_words(self.w.random, count)
        return _tame(words, dtype) if dtype in _FLOATING else words

    def _offset(self, nbytes: int, alignment: int = 128) -> int:
        return alignment * self.w.random.randrange((TILE - nbytes) // alignment + 1)

    def _barrier(self, nbytes: int | str) -> tuple[str, str, str]:
        """A fresh barrier that expects bytes: text, its operand, text that waits for it."""
        bar = f"bars+{8 * self.barriers}"
        self.barriers += 1
        label = self.w.label()
        cluster = "fence.mbarrier_init.release.cluster;\n" if self.size > 1 else ""
        return (
            f"@%first mbarrier.init.shared::cta.b64 [{bar}], 1;\n{cluster}"
            f"fence.proxy.async;\n{self.sync()}"
            f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [{bar}], {nbytes};\n",
            f"[{bar}]",
            f"{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [{bar}], 0;\n"
            f"@!%done bra {label};\n",
        )

    def _tensor_load(self) -> str:
        t = self.descriptor(True)
        begin, bar, wait = self._barrier(t.tile_bytes)
        prefetch = ""
        place = f"[%rd6, {self._coordinates(t, True)}]"
        if self.w.chance(0.2):
            prefetch = f"@%first cp.async.bulk.prefetch.tensor.{t.rank}d.L2.global.tile {place};\n"
            if self.w.chance(0.5):
                prefetch = f"@%first prefetch.tensormap [%rd6];\n{prefetch}"
        return (
            f"{self._map(t, False)}{begin}{prefetch}"
            f"@%first cp.async.bulk.tensor.{t.rank}d.shared::cluster.global.tile."
            f"mbarrier::complete_tx::bytes [tile+{self._offset(t.shared_bytes)}], {place}, "
            f"{bar};\n{wait}"
        )

    def _issue_store(self, text: str) -> str:
        read = "" if self.w.chance(0.7) else "cp.async.bulk.wait_group.read 0;\n"
        return (
            f"fence.proxy.async;\n{self.sync()}@%first {text};\ncp.async.bulk.commit_group;\n"
            f"{read}cp.async.bulk.wait_group 0;\n"
        )

    def _mine(self, text: str) -> str:
        """Restrict writes to memory to the first CTA of the cluster."""
        return text.replace("@%first cp", "@%lead cp") if self.size > 1 else text

    def _tensor_store(self) -> str:
        t = self.descriptor(False)
        return self._mine(
            self._map(t, True)
            + self._issue_store(
                f"cp.async.bulk.tensor.{t.rank}d.global.shared::cta.tile.bulk_group "
                f"[%rd6, {self._coordinates(t, False)}], [tile+{self._offset(t.shared_bytes)}]"
            )
        )

    def _tensor_reduction(self) -> str:
        t = self.descriptor(False)
        while t.dtype not in _REDUCTIONS or t.tf32:
            t = self.descriptor(False)
        name = self.w.random.choice(_REDUCTIONS[t.dtype])
        offset = self._offset(t.shared_bytes)
        return self._mine(
            self._map(t, True)
            + self._tamed(t.dtype)
            + self._issue_store(
                f"cp.reduce.async.bulk.tensor.{t.rank}d.global.shared::cta.{name}.tile.bulk_group "
                f"[%rd6, {self._coordinates(t, False)}], [tile+{offset}]"
            )
        )

    def _tamed(self, dtype: str) -> str:
        """Make the tile's words numbers of moderate size in a float type; NaN payloads are open."""
        kind = next((kind for kind in ("bf16", "f16", "f32") if kind in dtype), "")
        if not kind:
            return ""
        keep, put = _TAME[kind]
        again = self.w.label()
        return (
            f"shl.b32 %r3, %r10, 2;\n{again}:\nmov.u32 %r5, tile;\nadd.u32 %r5, %r5, %r3;\n"
            f"ld.shared.u32 %r4, [%r5];\nand.b32 %r4, %r4, {keep:#x};\n"
            f"or.b32 %r4, %r4, {put:#x};\nst.shared.u32 [%r5], %r4;\n"
            f"add.u32 %r3, %r3, {4 * THREADS};\nsetp.lt.u32 %more, %r3, {TILE};\n"
            f"@%more bra {again};\n"
        )

    def _pointer(self, written: bool, words: np.ndarray, offset: int) -> str:
        number = self.buffers.add(words, written)
        return (
            f"ld.param.u64 %rd7, [{self.buffers.name(written, number)}];\n"
            f"add.u64 %rd7, %rd7, {offset};\n"
        )

    def _bulk_sizes(self) -> tuple[int, int, int]:
        """Bytes of a copy, its offset in a buffer of 4 KiB, its offset in the tile."""
        size = 16 * self.w.random.choice((1, 2, 7, 8, self.w.random.randrange(1, 257)))
        return size, 16 * self.w.random.randrange((4096 - size) // 16 + 1), self._offset(size, 16)

    def _bulk_load(self) -> str:
        size, offset, place = self._bulk_sizes()
        begin, bar, wait = self._barrier(size)
        return (
            f"{self._pointer(False, self._contents('u32', 1024), offset)}{begin}"
            "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[tile+{place}], [%rd7], {size}, {bar};\n{wait}"
        )

    def _bulk_store(self) -> str:
        size, offset, place = self._bulk_sizes()
        return self._mine(
            self._pointer(True, self._contents("u32", 1024), offset)
            + self._issue_store(
                f"cp.async.bulk.global.shared::cta.bulk_group [%rd7], [tile+{place}], {size}"
            )
        )

    def _bulk_reduction(self) -> str:
        size, offset, place = self._bulk_sizes()
        form = self.w.random.choice(_BULK_REDUCTIONS)
        words = self._contents(form.split(".")[-1], 1024)
        return self._mine(
            self._pointer(True, words, offset)
            + self._tamed(form)
            + self._issue_store(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group."
                f"{form} [%rd7], [tile+{place}], {size}"
            )
        )

    def _cp_async(self) -> str:
        """Two or three groups of a copy a thread, waited for one after the other."""
        choose, text = self.w.random, ""
        groups = choose.randrange(1, 4)
        for _ in range(groups):
            size = choose.choice((4, 8, 16))
            cache = "cg" if size == 16 and self.w.chance(0.5) else "ca"
            place = self._offset(THREADS * 16, 16)
            extra = ""
            if self.w.chance(0.4):
                extra = f", {choose.randrange(size + 1)}"
            text += (
                f"{self._pointer(False, self._contents('u32', 1024), 0)}"
                f"mul.wide.u32 %rd8, %r10, {size};\nadd.u64 %rd7, %rd7, %rd8;\n"
                f"mov.u32 %r5, tile;\nmad.lo.u32 %r5, %r10, {size}, %r5;\n"
                f"cp.async.{cache}.shared.global [%r5+{place}], [%rd7], {size}{extra};\n"
                "cp.async.commit_group;\n"
                + (
                    "cp.async.wait_all;\nbar.sync 0;\n"
                    if self.w.chance(0.5)
                    else "cp.async.wait_group 0;\nbar.sync 0;\n"
                )
            )
        return text

    def _multicast(self) -> str:
        """Every CTA of the cluster sends one tile to the CTAs of a mask."""
        masks = [self.w.random.randrange(1 << self.size) for _ in range(self.size)]
        t = self.descriptor(True)
        while self.size * 2 * t.shared_bytes > TILE:
            t = self.descriptor(True)
        space = -(-t.shared_bytes // 1024) * 1024
        if self.size * space > TILE:
            return self._tensor_load()
        begin, bar, wait = self._barrier("%r12")
        choice = "".join(
            f"setp.eq.u32 %more, %r7, {rank};\n@%more mov.u32 %r11, {mask};\n@%more mov.u32 %r12, "
            f"{t.tile_bytes * sum(other >> rank & 1 for other in masks)};\n"
            for rank, mask in enumerate(masks)
        )
        return (
            f"{self._map(t, False)}mov.u32 %r7, %cluster_ctarank;\n{choice}{begin}"
            f"cvt.u16.u32 %mask, %r11;\nsetp.ne.and.u32 %more, %r11, 0, %first;\n"
            f"mov.u32 %r5, tile;\nmad.lo.u32 %r5, %r7, {space}, %r5;\n"
            f"@%more cp.async.bulk.tensor.{t.rank}d.shared::cluster.global.tile."
            "mbarrier::complete_tx::bytes.multicast::cluster [%r5], "
            f"[%rd6, {self._coordinates(t, True)}], {bar}, %mask;\n{wait}"
        )


#: Words that are numbers of moderate size in each half or as a whole: bits kept, bits set.
_TAME = {
    "f32": (0x83FFFFFF, 0x3C000000),
    "f16": (0x8FFF8FFF, 0x30003000),
    "bf16": (0x83FF83FF, 0x3C003C00),
}


def _tame(words: np.ndarray, dtype: str) -> np.ndarray:
    kind = next((kind for kind in ("bf16", "f16", "f32") if kind in dtype), "")
    if not kind:
        return words
    keep, put = _TAME[kind]
    return (words & np.uint32(keep)) | np.uint32(put)


def copies(seed: int) -> Program:
    """One to four copies; a quarter of the programs in clusters of 2 or 4, with multicast."""
    w = writer("copies", seed)
    size = w.random.choice((1, 1, 1, 1, 2, 4))
    maker = Copies(w, size)
    pieces = [maker.piece() for _ in range(w.random.randrange(1, 5))]
    again = w.label()
    head = (
        f"{shared(TILE).replace('.b64 bar;', f'.b64 bars[{max(1, maker.barriers)}];')}"
        f"{REGISTERS}.reg .b16 %mask;\n.reg .pred %lead;\nmov.u32 %r10, %tid.x;\n"
        "setp.eq.u32 %first, %r10, 0;\nmov.u32 %r7, %cluster_ctarank;\n"
        "setp.eq.and.u32 %lead, %r7, 0, %first;\nmov.u32 %r2, tile;\nshl.b32 %r3, %r10, 2;\n"
        f"mul.lo.u32 %r6, %r7, 0x01000000;\n{again}:\nadd.u32 %r5, %r2, %r3;\n"
        "mad.lo.u32 %r4, %r3, 0x9e3779b1, %r6;\nst.shared.u32 [%r5], %r4;\n"
        f"add.u32 %r3, %r3, {4 * THREADS};\nsetp.lt.u32 %more, %r3, {TILE};\n"
        f"@%more bra {again};\n{maker.sync()}"
    )
    dumped = np.zeros((size, TILE // 4), np.uint32)
    tail = dump(TILE, maker.buffers.name(True, maker.buffers.add(dumped, True))) + "ret;\n"
    buffers = maker.buffers
    maps = tuple(
        (number + (len(buffers.inputs) if written else 0), t) for written, number, t in buffers.maps
    )
    launch = Launch(size, THREADS, size, f".reqnctapercluster {size}, 1, 1\n" if size > 1 else "")
    return Program(
        "copies", seed, head, tuple(Piece(buffers.resolve(piece.before)) for piece in pieces),
        buffers.resolve(tail), launch, tuple(buffers.inputs), tuple(buffers.outputs), maps,
    )  # fmt: skip
