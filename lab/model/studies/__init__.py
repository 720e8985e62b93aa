"""What the timing model says of one question each, for the commands."""
