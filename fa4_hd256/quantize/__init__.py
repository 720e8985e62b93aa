"""Quantizers of low-precision formats that calls take, in PyTorch."""

from .mxfp8 import (
    Mxfp8,
    Mxfp8Gradients,
    Mxfp8Training,
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_training,
)
from .nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

__all__ = [
    "Mxfp8",
    "Mxfp8Gradients",
    "Mxfp8Training",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "nvfp4_global_scale",
    "quantize_mxfp8",
    "quantize_mxfp8_training",
    "quantize_nvfp4",
]
