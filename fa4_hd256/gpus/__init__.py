"""The GPUs that kernels run on: the family, and the facts of one."""
