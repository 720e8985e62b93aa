"""Steps of Blackwell's kernels, for `kernels.proof`."""
