"""Stale messages counted by the million on a Hopper GPU, and figures of its single kernels."""
