"""The torch operators behind the public functions, and their gradients."""
