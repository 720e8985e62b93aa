"""Hopper in the timing model: calls, clocks, and rows that were measured."""
