"""Where rows of keys, queries and results lie in global memory."""
