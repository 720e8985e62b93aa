"""Measuring on a GPU: interleaved timing, correctness first, kernels of one thing each."""
