"""The decode kernel for keys and values in e4m3."""
