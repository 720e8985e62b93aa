"""PTX text to instructions."""
