"""Pictures of docs/pictures, drawn from the code by `python -m lab pictures`."""
