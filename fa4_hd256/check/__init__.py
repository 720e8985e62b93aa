"""Checks of the operator: the reference, and the demo."""
