"""Published rates of GEMMs."""

TILUS = "nvidia.github.io/tilus, tutorial on matmul for Blackwell: cuBLAS and its last version"
#: TFLOPS by size.
GEMM_PUBLISHED = {8192: 1610.0}
