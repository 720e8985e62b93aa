"""Machine code of a kernel: instructions, what each occupies, and the path that a warp took."""
