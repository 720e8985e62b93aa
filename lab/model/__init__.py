"""Attention on the timing model: tiles of a call, costs of a kernel, times of whole problems."""
