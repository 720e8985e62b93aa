"""Golden cases of instructions, by family."""
