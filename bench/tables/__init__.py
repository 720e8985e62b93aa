"""Results as tables, files and plots."""
