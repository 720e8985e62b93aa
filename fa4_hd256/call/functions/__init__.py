"""Functions of users in a call: what they mean, what they read, and whether that has changed."""
