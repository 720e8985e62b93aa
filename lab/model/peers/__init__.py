"""Kernels of other projects in the timing model, earlier releases among them."""
