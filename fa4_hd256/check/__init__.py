"""Checks of the operator: the reference, the demo and the bringup of a GPU."""
