"""The words that tcgen05.mma takes, for those who write PTX by hand: instruction descriptors and
descriptors of matrices in shared memory (PTX ISA, tcgen05)."""

from sm100_sim.isa.tensor.descriptors import (
    KINDS,
    InstructionDescriptor,
    MatrixDescriptor,
    encode_instruction,
    encode_matrix,
)

__all__ = [
    "KINDS",
    "InstructionDescriptor",
    "MatrixDescriptor",
    "encode_instruction",
    "encode_matrix",
]
