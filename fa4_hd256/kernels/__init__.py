"""The kernels, and what those of every architecture share."""
