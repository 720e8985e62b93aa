"""Plans of kernels as data, and the proof that they end."""
