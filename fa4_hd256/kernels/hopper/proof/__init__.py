"""Steps of Hopper's kernels, for `kernels.proof`."""
