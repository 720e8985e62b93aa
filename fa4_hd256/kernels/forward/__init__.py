"""Parts that forward kernels of every architecture share."""
