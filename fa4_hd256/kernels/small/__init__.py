"""Kernels without tensor cores."""
