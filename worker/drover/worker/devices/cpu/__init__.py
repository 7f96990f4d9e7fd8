"""The cpu device: kernels in Python, compiled by numba, and a flat program of records that they execute.

Reading order: `record` (one operation of a program), `run` (the interpreter), `program` and `lowering` (graph to
records), `threads` and `sync`, `device`; then `simd` and `vector` (the instructions), and a file for each family of
kernels: `matmul` (over `weights`, `quantize` and `rows`, and with `tiles` over `gemm` and `gemm_k`), `attention` (over
`products` and `in_order`), `elementwise`, `norm`, `rope`, `copy` (over `blocks`), `recurrent`, `streams`, `routing`,
`sorting`, `windows`, `reductions`. `lowering` and its families make a `draft` of each node. `kernel_cache` says where
compiled kernels are kept; it must be able to before numba is imported, so nothing is imported here.
"""
