"""The forward: attention, and combining of KV splits."""
