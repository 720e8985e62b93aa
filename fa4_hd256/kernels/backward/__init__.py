"""Parts that backward kernels of every architecture share."""
