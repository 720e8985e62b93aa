"""Golden vectors: what a Hopper GPU computes, recorded once and replayed in the simulator's tests.

| module | what |
|---|---|
| cases, collection | a case and its stored results; all cases, and storing them |
| record | runs the cases on a GPU: `python -m sm100_sim record` |
| replay | runs a case in the simulator |
| comparing, bounds | outputs against recorded ones; bounds of approximate functions |
| inputs, ptx_text | what the cases are made from |
| arithmetic, convert | elementwise instructions, approximations, conversions |
| warp | shuffles, votes, prmt, ldmatrix, stmatrix |
| atomics | atomics and reductions |
| tma, tensormaps | tensor copies; the driver's tensor maps |
| found | what random programs found |
| wgmma, tensor_sums | asynchronous products of a warpgroup; how an H200 adds their terms |
| scripts, rules_* | rules of the machine, kept and broken, and how each kernel ends |
| cluster, asynchronous | mbarriers and shared memory of a cluster; cp.async, bulk copies |

`tcgen05` and `pairs` hold cases that a Hopper GPU cannot record, each with what numpy makes of the
manual: the simulator's tests and the first hour on a B200 compare with that.

Recording needs a CUDA driver, cuda-bindings and numpy, nothing else of the simulator.
"""

from .cases import DIRECTORY, KERNEL, TENSOR_MAPS, Case, Vectors
from .collection import all_cases, groups, save

__all__ = [
    "DIRECTORY",
    "KERNEL",
    "TENSOR_MAPS",
    "Case",
    "Vectors",
    "all_cases",
    "groups",
    "save",
]
