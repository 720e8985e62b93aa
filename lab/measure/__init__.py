"""One-off measurements of kernels and calls."""
