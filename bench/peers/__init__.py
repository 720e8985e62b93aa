"""Other libraries' kernels beside ours, a module each."""
