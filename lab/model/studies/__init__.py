"""Questions that one command each asks the timing model."""
