"""Kernels compiled ahead of time: which ones, into which directory, and how it is used."""
