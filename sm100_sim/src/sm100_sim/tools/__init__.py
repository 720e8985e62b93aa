"""Tools that hold the simulator against silicon and against itself."""
