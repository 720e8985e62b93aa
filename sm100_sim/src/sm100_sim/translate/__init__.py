"""Kernels to native code, and the cache of it."""
