"""Instructions of the tensor cores: tcgen05, wgmma and mma.sync, their operands and numerics."""
