"""Kernels that are not this project's, whole launches of them predicted and measured."""
