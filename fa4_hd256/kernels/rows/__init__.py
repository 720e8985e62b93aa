"""Places of keys, queries and results in global memory."""
