"""State of a launch: warps, memories, barriers, asynchronous operations, tensor maps."""
