"""The GPUs that kernels run on: the family, and what is asked of one."""
