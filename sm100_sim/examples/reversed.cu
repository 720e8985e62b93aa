// 64 numbers in reverse, through shared memory. The barrier between the store and the load is missing:
//
//     sm100-sim run examples/reversed.cu --kernel reversed --block 64 \
//         --arg "i32[64]=arange" --arg "i32[64]" --sanitize
//
// With --flag=-DBARRIER it is there, and nothing is found.
__global__ void reversed(const int* in, int* out) {
  __shared__ int cells[64];
  cells[threadIdx.x] = in[threadIdx.x];
#ifdef BARRIER
  __syncthreads();
#endif
  out[threadIdx.x] = cells[63 - threadIdx.x];
}
