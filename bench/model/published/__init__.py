"""Rates that others have published, each with the kernel, the GPU and the protocol it is of."""

from . import flash_attention, nvidia

#: All of attention.
ROWS = (
    *flash_attention.FORWARD_256, *flash_attention.BACKWARD_256, *flash_attention.FORWARD_128,
    *nvidia.TRAINING, *nvidia.INFERENCE, *nvidia.DECODE, *nvidia.FROST_BACKWARD,
    *nvidia.CUDNN_BACKWARD, *nvidia.PROFILED,
)  # fmt: skip
