"""What backward kernels of every architecture share."""
