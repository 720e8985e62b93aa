"""The forward kernel."""
