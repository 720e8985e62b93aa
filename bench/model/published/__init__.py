"""Rates that others have published, each with the kernel, the GPU and the protocol it is of."""
