"""Plans of kernels as data."""
