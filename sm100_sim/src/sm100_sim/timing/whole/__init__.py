"""Whole problems: many tiles on all SMs, and the conditions of a measured time."""
