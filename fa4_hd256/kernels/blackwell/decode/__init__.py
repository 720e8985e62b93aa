"""The forward of a few query rows against many keys."""
