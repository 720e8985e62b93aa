"""Which keys a query sees."""
