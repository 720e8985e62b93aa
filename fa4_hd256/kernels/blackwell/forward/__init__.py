"""The forward: attention, and combining parts of the keys."""
