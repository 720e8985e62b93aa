"""The commands of `python -m bench`, a module each."""
