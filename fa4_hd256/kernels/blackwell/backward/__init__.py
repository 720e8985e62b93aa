"""The backward: preprocessing, dK and dV, dQ."""
