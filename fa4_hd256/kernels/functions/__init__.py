"""Functions of scores and of masks that a user wrote."""
