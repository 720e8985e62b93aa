"""A differential fuzzer: random legal PTX programs, run on a Hopper GPU and in the simulator.

| module | what |
|---|---|
| program | a program of pieces that can be left out; the source of its choices |
| arithmetic, straight | instructions on a thread's registers; programs of them alone |
| control | divergence, reconvergence, warp operations under masks |
| memory | a thread's own loads, stores and atomics |
| shared, cluster | phases between barriers of a CTA or a cluster |
| copies | tensor copies, bulk copies, cp.async |
| mbarriers | sequences of operations on mbarriers, asynchronous arrivals |
| hangs | barriers and register pools that may not balance |
| families | all of them, by name |
| outcome | what a run of a program gave, and the files of such outcomes |
| gpu, simulate | run programs on a GPU and in the simulator |
| shrink | the smallest variant that still differs |
| command | `python -m lab.fuzz` |

Programs are made from a family's name and a seed on both sides; a digest ties the results together.
The GPU side needs a CUDA driver, cuda-bindings and numpy, nothing else of the simulator.
"""
