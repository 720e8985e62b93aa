"""Description of a call: its problem, checked once, and its splitting."""
