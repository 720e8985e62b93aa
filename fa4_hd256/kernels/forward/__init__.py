"""What forward kernels of every architecture share."""
