"""Gradients in mxfp8: the kernels of a stored dS, with scales of blocks."""
