"""Counterparts of bench's commands on the timing model: `bench.modelled` finds them by name."""
