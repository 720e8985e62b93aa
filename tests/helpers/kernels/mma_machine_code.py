"""MMAs of a kernel, in PTX and in machine code, followed symbolically.

ptxas turns a chain of tcgen05.mma (`blackwell.instructions.mma_chain`) into uniform registers that
it computes, spills and reuses.  The simulator runs the PTX, so it sees no error made there.  Here a
register's value is a constant, or the result of an instruction that is not followed plus a constant
(`Value`).  That is enough to know of each MMA in machine code the instruction descriptor, the upper
words of both matrix descriptors, the distances within a chain of their lower words, that the chain
has one result, and whether it adds: all that `Chain` has.  The common base of a chain's addresses
is not followed.

`hazards` looks at scoreboards.  What instructions of fixed latency make, which stall counts order,
is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sm100_sim.timing.machine_code.sass import SassFunction, SassInstruction

#: (where it was made, offset): a constant is made at "".
Value: TypeAlias = tuple[str, int]
Registers: TypeAlias = dict[str, Value]

_WORD = 0xFFFFFFFF
_REGISTER = re.compile(r"(?<![A-Za-z_])U?R(?:\d+|Z)(?![A-Za-z_\d])")
_NUMBER = re.compile(r"-?0x[0-9a-f]+$|-?\d+$")
_OPERANDS = re.compile(
    r"(?:gdesc|(tmem))\[(UR\d+)(?:\+(0x[0-9a-f]+))?\], gdesc\[(UR\d+)\], tmem\[(UR\d+)\], "
    r"tmem\[(UR\d+)\], idesc\[(UR\d+)\], (?:tmem\[(UR\d+)\], )?(!?UPT|!?UP\d)"
)
#: Copies: the value of the first operand that is no zero register.
_COPIES = ("UMOV", "MOV", "MOV.SPILL", "R2UR", "R2UR.FILL", "R2UR.BROADCAST", "IMAD.MOV.U32")
_SUMS = ("UIADD3", "IADD3", "VIADD", "UVIADD")


@dataclass(frozen=True)
class Chain:
    """MMAs on one result.  kind, group: of the instruction.  a, b: distance of each operand from
    the first one, in the units of its address.  upper_a, upper_b: upper words of the descriptors,
    None for A in tensor memory.  descriptor: of the instruction.  adds: whether each one adds to
    the result; None where that is decided at run time.  scales: with scales of blocks, of each MMA
    the bits of its own in the descriptor, and the distances of A's and B's from the first one's."""

    kind: str
    group: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    upper_a: int | None
    upper_b: int
    descriptor: int
    adds: tuple[bool | None, ...]
    scales: tuple[tuple[int, int, int], ...] = ()


# --------------------------------------------------------------------------------- PTX

_BLOCK = re.compile(r"\{\s*\.reg \.pred elected, add;(.*?)\n\}", re.DOTALL)
_MMA = re.compile(
    r"@elected tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)(?:\.block_scale\.block32)? "
    r"\[[^\]]+\], (a_desc|\[a \+ (\d+)\]), b_desc, "
    r"(\d+|idesc, \[a_scales\], \[b_scales\]), (add|1);"
)
#: Bits of a descriptor that name the byte of a slice's scales.
_SCALE_IDS = 3 << 29 | 3 << 4


def chains_of_ptx(text: str) -> list[Chain]:
    """Return the chains of a module in the order of its text."""
    found = []
    for block in _BLOCK.findall(re.sub(r"\t\.loc[^\n]*\n", "", text)):
        mmas = _MMA.findall(block)
        lower = {name: _numbers(rf"add\.u32 {name}_low, {name}, (\d+);", block) for name in "ab"}
        upper = {name: _numbers(rf"{name}_desc, \{{{name}_low, (\w+)\}}", block) for name in "ab"}
        in_tmem = mmas[0][2] != "a_desc"
        a = tuple(int(mma[3]) for mma in mmas) if in_tmem else lower["a"]
        first = re.search(r"setp\.ne\.b32 add, (%\w+|\d+), 0;", block)
        assert first is not None and len(set(upper["b"])) == 1 and len(set(upper["a"])) <= 1
        start = None if first[1].startswith("%") else first[1] != "0"
        ((group, kind, described),) = {(int(m[0]), m[1], m[4]) for m in mmas}
        scales = _scales_of_ptx(block)
        if scales:
            described = re.search(r"or\.b32 idesc, (\d+)", block)[1]
        found.append(
            Chain(
                kind,
                group,
                tuple(x - a[0] for x in a),
                tuple(x - lower["b"][0] for x in lower["b"]),
                None if in_tmem else upper["a"][0],
                upper["b"][0],
                int(described),
                tuple(start if mma[5] == "add" else True for mma in mmas),
                scales,
            )
        )
    return found


def _scales_of_ptx(block: str) -> tuple[tuple[int, int, int], ...]:
    """Return `Chain.scales` of a chain's text."""
    bits = _numbers(r"or\.b32 idesc, \d+, (\w+);", block)
    places = [_numbers(rf"add\.u32 {name}_scales, %\w+, (\w+);", block) for name in "ab"]
    return tuple(
        (own, a - places[0][0] & _WORD, b - places[1][0] & _WORD)
        for own, a, b in zip(bits, *places, strict=True)
    )


def _numbers(pattern: str, text: str) -> tuple[int, ...]:
    return tuple(int(number, 0) for number in re.findall(pattern, text))


# ---------------------------------------------------------------------- machine code


def written(instruction: SassInstruction) -> list[str]:
    """Return the registers that an instruction writes, uniform ones and others."""
    first = instruction.operands
    opcode = instruction.opcode
    if re.match(r"ST|SYNCS|UTC|UTMA|BRA|EXIT|BAR|RED\b|WARPSYNC|CALL|RET|UBLK|UCGABAR", opcode):
        return _of_synchronisation(instruction)
    while re.match(r"!?U?P(?:\d|T)\s*,", first):
        first = first.split(",", 1)[1].strip()
    match = re.match(r"(U?R)(\d+)(?:\.\w+)*\s*(?:,|$)", first)
    if not match:
        return []
    count = _width(opcode)
    return [f"{match[1]}{int(match[2]) + i}" for i in range(count)]


def _of_synchronisation(instruction: SassInstruction) -> list[str]:
    """Barriers and atomics may return a state, in one or two registers."""
    match = re.match(r"(?:U?P\d, )?(U?R)(\d+),", instruction.operands)
    if not match or instruction.base in ("ST", "STG", "STS", "STL", "STTM", "UTCBAR"):
        return []
    return [f"{match[1]}{int(match[2]) + i}" for i in range(2)]


def _width(opcode: str) -> int:
    vector = re.search(r"\.x(\d+)", opcode)
    if vector:
        # A fragment of 16 lanes of so many bits has as many registers.
        bits = re.search(r"16dp(\d+)bit", opcode)
        return int(vector[1]) * (int(bits[1]) // 64 if bits else 1)
    if ".128" in opcode:
        return 4
    if re.search(r"\.64\b|\.WIDE|F32X2|\.2\b", opcode) or opcode.startswith(
        ("UIADD3.64", "FADD2", "FMUL2", "FFMA2")
    ):
        return 2
    return 1


def _sources(instruction: SassInstruction) -> list[str]:
    """Return operands behind the destination, without predicates."""
    parts = [part.strip() for part in instruction.operands.split(",")]
    return [p.removesuffix(".reuse") for p in parts[1:] if not re.match(r"!?U?P(?:\d|T)$", p)]


def _value(operand: str, registers: Registers) -> Value | None:
    """Return the value of an operand, None for one that is not followed."""
    if operand in ("RZ", "URZ"):
        return "", 0
    if _NUMBER.match(operand):
        return "", int(operand, 0) & _WORD
    if re.match(r"U?R\d+$", operand):
        return registers.get(operand, (f"{operand} at entry", 0))
    return None


def _result(instruction: SassInstruction, registers: Registers) -> Value | None:
    """Return the value that an instruction writes, if it is a copy or a sum with constants."""
    sources = _sources(instruction)
    opcode = instruction.opcode
    if opcode in _COPIES:
        values = [_value(s, registers) for s in sources]
        known = [v for v in values if v != ("", 0)] or values[:1]
        return known[0] if len(known) == 1 else None
    if opcode == "IMAD.U32" and sources[:2] == ["RZ", "RZ"]:
        return _value(sources[2], registers)
    if opcode not in _SUMS:
        return None
    values = [_value(s, registers) for s in sources]
    roots = [v[0] for v in values if v is not None and v[0]]
    if None in values or len(roots) > 1:
        return None
    total = sum(v[1] for v in values if v is not None) & _WORD
    return (roots[0] if roots else "", total)


def _step(instruction: SassInstruction, registers: Registers) -> None:
    """Apply an instruction to the values of registers."""
    targets = written(instruction)
    value = _result(instruction, registers) if len(targets) == 1 else None
    for target in targets:
        here = (f"{instruction.offset:x} {target}", 0)
        if instruction.guard and registers.get(target) == value and value is not None:
            continue
        registers[target] = here if value is None or instruction.guard else value


def _entries(function: SassFunction) -> list[Registers]:
    """Return the values of registers at the start of each block: those that all ways to it agree
    on; what they differ in is made there."""
    entries: list[Registers | None] = [None] * len(function.blocks)
    entries[0] = {}
    pending = [0]
    while pending:
        index = pending.pop()
        block, registers = function.blocks[index], dict(entries[index] or {})
        for instruction in function.instructions[block.start : block.stop]:
            _step(instruction, registers)
        for successor in block.successors:
            known = entries[successor]
            merged = registers if known is None else _merged(known, registers, successor)
            if merged != known:
                entries[successor] = dict(merged)
                pending.append(successor)
    return [entry or {} for entry in entries]


def _merged(known: Registers, other: Registers, block: int) -> Registers:
    found = {}
    for name in known.keys() | other.keys():
        one, two = (values.get(name, (f"{name} at entry", 0)) for values in (known, other))
        found[name] = one if one == two else (f"block {block} {name}", 0)
    return found


@dataclass(frozen=True)
class MachineMma:
    """An MMA of machine code, with the values of its operands."""

    instruction: SassInstruction
    group: int
    kind: str
    a_in_tmem: bool
    a: Value
    upper_a: Value
    b: Value
    upper_b: Value
    result: Value
    mask: Value
    descriptor: Value
    adds: bool | None
    scales: tuple[Value, Value] | None = None


def machine_mmas(function: SassFunction) -> list[MachineMma]:
    """Return the MMAs of a function in the order of its text."""
    found = []
    for block, entry in zip(function.blocks, _entries(function), strict=True):
        registers = dict(entry)
        for instruction in function.instructions[block.start : block.stop]:
            if instruction.base in ("UTCHMMA", "UTCQMMA"):
                found.append(_read(instruction, registers))
            _step(instruction, registers)
    return found


def _read(instruction: SassInstruction, registers: Registers) -> MachineMma:
    match = _OPERANDS.fullmatch(instruction.operands.strip())
    assert match, f"an MMA of a form that is not known: {instruction.text}"
    assert not instruction.guard, f"an MMA under a predicate: {instruction.text}"

    def value(name: str, further: int = 0) -> Value:
        name = f"UR{int(name[2:]) + further}"
        return registers.get(name, (f"{name} at entry", 0))

    in_tmem, a, offset, b, result, mask, descriptor, scales, adds = match.groups()
    kind = "f8f6f4" if instruction.base == "UTCQMMA" else "f16"
    root, place = value(a)
    return MachineMma(
        instruction,
        2 if ".2CTA" in instruction.opcode else 1,
        f"mx{kind}" if scales else kind,
        in_tmem is not None,
        (root, place + int(offset or "0", 0)),
        value(a, 1),
        value(b),
        value(b, 1),
        value(result),
        value(mask),
        value(descriptor),
        {"UPT": True, "!UPT": False}.get(adds),
        (value(scales), value(scales, 1)) if scales else None,
    )


def chains_of_machine_code(function: SassFunction, wanted: list[Chain]) -> list[Chain]:
    """Return the chains of a function, cut at the lengths of `wanted`, in the order of its text.

    Raises AssertionError, with the instructions, for MMAs that are none of them.
    """
    mmas = machine_mmas(function)
    found, start = [], 0
    while start < len(mmas):
        # Those whose first MMA is decided at run time last: machine code may know more of it.
        for chain in sorted(dict.fromkeys(wanted), key=lambda chain: chain.adds[0] is None):
            part = mmas[start : start + len(chain.a)]
            if len(part) == len(chain.a) and (one := _chain(part)) and _agrees(one, chain):
                found.append(chain)
                start += len(part)
                break
        else:
            texts = "\n".join(f"{m.instruction.text}: {m}" for m in mmas[start : start + 4])
            raise AssertionError(f"MMA {start} of {len(mmas)} begins no chain of the PTX:\n{texts}")
    return found


def _chain(mmas: list[MachineMma]) -> Chain | None:
    """Return a run of MMAs as a chain; None if they are not on one result from one base."""
    first = mmas[0]
    # The byte of scales is each MMA's own.
    of_slice = _SCALE_IDS if first.scales else 0
    same = {
        (m.group, m.kind, m.a_in_tmem, m.a[0], m.b[0], m.result, m.mask, m.descriptor[0],
         m.descriptor[1] & ~of_slice, *(root for root, _ in m.scales or ()))
        for m in mmas
    }  # fmt: skip
    uppers = {m.upper_b for m in mmas} | (
        {m.upper_a for m in mmas} if not first.a_in_tmem else set()
    )
    if len(same) > 1 or first.mask != ("", 0) or first.descriptor[0]:
        return None
    if (
        any(root for root, _ in uppers)
        or len({(m.upper_a if not m.a_in_tmem else 0, m.upper_b) for m in mmas}) > 1
    ):
        return None
    return Chain(
        first.kind,
        first.group,
        tuple(m.a[1] - first.a[1] for m in mmas),
        tuple(m.b[1] - first.b[1] for m in mmas),
        None if first.a_in_tmem else first.upper_a[1],
        first.upper_b[1],
        first.descriptor[1] & ~of_slice,
        tuple(m.adds for m in mmas),
        tuple(
            (
                m.descriptor[1] & of_slice,
                *(x - y & _WORD for (_, x), (_, y) in zip(m.scales, first.scales)),
            )
            for m in mmas
            if m.scales and first.scales
        ),
    )


def _agrees(machine: Chain, ptx: Chain) -> bool:
    """Return True if machine code does what the PTX says.  Where the PTX leaves to run time whether
    the first MMA adds, machine code may know."""
    adds = zip(machine.adds, ptx.adds, strict=True)
    rest = [getattr(machine, name) == getattr(ptx, name) for name in
            ("kind", "group", "a", "b", "upper_a", "upper_b", "descriptor", "scales")]  # fmt: skip
    return all(rest) and all(wanted is None or mine == wanted for mine, wanted in adds)


# ---------------------------------------------------------------------- scoreboards

#: The scoreboard of an instruction without one: tensor cores take instructions in order, so it is
#: that of the next one.
NEXT = -1

#: For each register what is under way: ("read", scoreboard), ("made", scoreboard), or ("loaded",
#: scoreboard) by a load of tensor memory.
UnderWay: TypeAlias = dict[str, frozenset[tuple[str, int]]]


def hazards(function: SassFunction) -> list[str]:
    """Return what scoreboards leave open of operands of tcgen05 instructions, as sentences.

    Operands of MMAs, commits and stores must be made before, and not be overwritten until they have
    been read.  What a load of tensor memory makes may be used when it is there.
    """
    found: dict[str, None] = {}
    entries: list[UnderWay | None] = [None] * len(function.blocks)
    entries[0] = {}
    pending = [0]
    while pending:
        index = pending.pop()
        block, state = function.blocks[index], dict(entries[index] or {})
        for instruction in function.instructions[block.start : block.stop]:
            found.update(dict.fromkeys(_issue(instruction, state)))
        for successor in block.successors:
            known = entries[successor]
            merged = dict(known or {})
            for name, marks in state.items():
                merged[name] = merged.get(name, frozenset()) | marks
            if known is None or merged != known:
                entries[successor] = merged
                pending.append(successor)
    return list(found)


def _issue(instruction: SassInstruction, state: UnderWay) -> Iterator[str]:
    """Apply an instruction to what is under way; yield what it does too early."""
    control = instruction.control
    for name, marks in list(state.items()):
        state[name] = frozenset(m for m in marks if m[1] == NEXT or not control.waits >> m[1] & 1)
        if not state[name]:
            del state[name]
    said = f"{instruction.offset:#x}: {instruction.text}"
    reads, targets = _tensor_operands(instruction), written(instruction)
    for name in reads:
        if any(what != "read" for what, _ in state.get(name, ())):
            yield f"{said} reads {name} before it is made"
    for name in _REGISTER.findall(instruction.operands):
        if any(what == "loaded" for what, _ in state.get(name, ())):
            yield f"{said} touches {name}, which a load of tensor memory may still write"
    for name in targets:
        if any(what == "read" for what, _ in state.get(name, ())):
            yield f"{said} overwrites {name}, which may not have been read"
        state.pop(name, None)
    if control.sets is not None:
        how = "loaded" if instruction.base == "LDTM" else "made"
        for name in targets:
            state[name] = state.get(name, frozenset()) | {(how, control.sets)}
    _mark_reads(instruction, reads, state)


def _mark_reads(instruction: SassInstruction, reads: list[str], state: UnderWay) -> None:
    frees = instruction.control.frees
    if not instruction.base.startswith("UTC"):
        if frees is not None:
            for name in reads:
                state[name] = state.get(name, frozenset()) | {("read", frees)}
        return
    mine = NEXT if frees is None else frees
    for name, marks in list(state.items()):
        state[name] = frozenset(("read", mine) if m == ("read", NEXT) else m for m in marks)
    for name in reads:
        state[name] = state.get(name, frozenset()) | {("read", mine)}


def _tensor_operands(instruction: SassInstruction) -> list[str]:
    """Return the registers that a tcgen05 instruction reads: of matrix descriptors two."""
    if instruction.base in ("UTCHMMA", "UTCQMMA"):
        # Scales are two words behind the descriptor.
        operands = re.sub(r"(idesc\[UR\d+\], )tmem", r"\1scales", instruction.operands)
        found = re.findall(r"(\w+)\[UR(\d+)", operands)
        two = ("gdesc", "scales")
        return [f"UR{int(n) + i}" for kind, n in found for i in range(1 + (kind in two))]
    if instruction.base == "UTCCP":
        found = re.findall(r"(\w+)\[UR(\d+)", instruction.operands)
        return [f"UR{int(n) + i}" for kind, n in found for i in range(1 + (kind == "gdesc"))]
    if instruction.base == "UTCBAR":
        return re.findall(r"UR\d+", instruction.operands)
    if instruction.base == "STTM":
        data = int(re.findall(r", R(\d+)", instruction.operands)[-1])
        return [f"R{data + i}" for i in range(_width(instruction.opcode))]
    return []
