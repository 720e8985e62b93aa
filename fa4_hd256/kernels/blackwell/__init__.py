"""Kernels of CTA pairs with tensor memory (compute capability 10.x)."""
