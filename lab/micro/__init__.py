"""Measurements of single instructions and of a whole GPU, as JSON beside what makes them."""
