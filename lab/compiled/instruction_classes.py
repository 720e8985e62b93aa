"""Classes of the instructions of a compiled kernel."""

from __future__ import annotations

from collections import Counter

from sm100_sim.timing import SassFunction, SassInstruction, disassemble

#: Class -> opcodes, up to the first dot; the first class that matches counts. `instruction_class`
#: adds the moves that ptxas writes as multiplications and the uniform datapath (U...).
CLASSES = {
    "FFMA2": ("FFMA2",),
    "FMUL2": ("FMUL2",),
    "FADD2": ("FADD2",),
    "FFMA, FMUL, FADD": ("FFMA", "FMUL", "FADD"),
    "MUFU": ("MUFU",),
    "FMNMX": ("FMNMX", "FMNMX3"),
    "F2F, F2FP": ("F2F", "F2FP", "F2I", "I2F", "I2FP"),
    "FSETP, FSEL": ("FSETP", "FSEL"),
    "integer": (
        "IADD", "IADD3", "VIADD", "IMAD", "LEA", "SHF", "SHL", "SHR", "LOP3", "PLOP3", "ISETP",
        "SEL", "PRMT", "IMNMX", "VIMNMX", "VIADDMNMX", "IABS", "POPC", "FLO", "R2P", "P2R", "SGXT",
        "BMSK",
    ),
    "MOV": ("MOV",),
    "R2UR": ("R2UR", "S2R", "S2UR", "CS2R"),
    "SYNCS": ("SYNCS", "NANOSLEEP"),
    "LDTM, STTM": ("LDTM", "STTM"),
    "UTCMMA": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCBAR", "UTCCP"),
    "LD, ST": (
        "LDS", "STS", "LDG", "STG", "LD", "ST", "LDC", "LDCU", "LDL", "STL", "ATOMS", "ATOMG",
        "RED", "UTMALDG", "UTMASTG", "UBLKCP", "STAS",
    ),
    "branch": (
        "BRA", "BRX", "BRXU", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "JMP",
        "YIELD",
    ),
    "fence, vote": (
        "FENCE", "MEMBAR", "ELECT", "VOTE", "VOTEU", "BAR", "DEPBAR", "CCTL", "ERRBAR", "ACQBULK",
        "UCGABAR_ARV", "UCGABAR_WAIT",
    ),
    "NOP": ("NOP",),
}  # fmt: skip
UNIFORM, OTHER = "uniform", "other"
CLASS_NAMES = (*CLASSES, UNIFORM, OTHER)
_CLASS_OF_OPCODE = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}


def instruction_class(instruction: SassInstruction) -> str:
    """One of CLASS_NAMES."""
    base = instruction.base
    # ptxas spreads moves over the pipes: as a multiplication by RZ, in integer or half.
    moves = instruction.opcode.startswith("IMAD.MOV") or (
        base in ("IMAD", "HFMA2") and instruction.operands.count("RZ,") == 2
    )
    if moves:
        return "MOV"
    if base in _CLASS_OF_OPCODE:
        return _CLASS_OF_OPCODE[base]
    return UNIFORM if base.startswith("U") else OTHER


def class_counts(instructions: list[SassInstruction]) -> dict[str, int]:
    """Class -> number of instructions, every class present."""
    counts = Counter(map(instruction_class, instructions))
    return {name: counts[name] for name in CLASS_NAMES}


def kernel_code(cubin: bytes, kernel: str | None = None) -> SassFunction:
    """The kernel of a cubin by its (mangled) name; without one the longest function.

    Raises RuntimeError if nvdisasm is not installed, KeyError for a kernel that is not there.
    """
    functions = disassemble(cubin)
    if kernel is not None:
        return functions[kernel]
    return max(functions.values(), key=lambda function: len(function.instructions))
