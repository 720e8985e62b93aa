"""Instructions that only compute or move: LLVM IR for 32 lanes at a time."""
