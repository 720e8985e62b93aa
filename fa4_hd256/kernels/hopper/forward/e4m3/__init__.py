"""The forward of Hopper for Q, K and V in e4m3."""
