"""Published and measured figures against the timing model."""
