"""Way from a call to its kernels: which ones, compiled how, launched where."""
