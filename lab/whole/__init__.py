"""Whole problems: tiles of a kernel on all SMs, by costs that replays of a few clusters give."""
