"""Kernels for Hopper (SM90): wgmma, a CTA or a cluster of them a tile."""
