"""Quantizers of low-precision formats that calls take, in PyTorch."""

from .nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

__all__ = ["dequantize_nvfp4", "nvfp4_global_scale", "quantize_nvfp4"]
