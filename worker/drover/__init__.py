"""Drover's data plane: ggml RPC workers, the coordinator that drives them, and the `drover` command.

Reading order: `ggml` (what a tensor is) and `rpc` (the language), then either side of it: `worker` obeys, `coordinator`
drives. `plan` says which layers live where and `spec` what a user asks for; `local`, over `herd`, starts it all on one
machine, and `cli` is the command. `errors`, `logs`, `sizes` and `hashing` serve everyone. docs/architecture.md has the
arrows between them. Nothing is imported here.
"""

__version__ = "0.1.0"
