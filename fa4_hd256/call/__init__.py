"""What a call is: its problem, checked once, and how it is divided."""
