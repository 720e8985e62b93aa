"""LLVM in process: modules of IR to native code, and the cache of it on disk."""
