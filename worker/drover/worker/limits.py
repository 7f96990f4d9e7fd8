"""What clients may take of a worker at most; the defaults are beyond what any client needs. Pure."""

from dataclasses import dataclass

MAX_CLIENTS = 256
MAX_GRAPHS = 1024
"""Graphs that a client believes we keep, of each device, before it forgets them all (docs/protocol.md section 3.4)."""
MAX_NODES = 1 << 18
MAX_TENSORS = 1 << 18
FRAME_SECONDS = 60.0
"""How long a client may pause in the middle of a request, or of taking an answer."""
GRACE = 10.0
"""How long what runs may take to end when the worker stops."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for each client by itself; to go beyond one costs an answer of "no" or that client's connection."""

    memory: int | None = None
    """Bytes of buffers, on all devices together; None is whatever the devices have."""
    graphs: int = MAX_GRAPHS
    """Graphs kept on each device; with fewer than the client counts on, it may ask for one that is gone."""
    nodes: int = MAX_NODES
    """Nodes of a graph."""
    tensors: int = MAX_TENSORS
    """Tensors of a graph."""
    payload: int = 64 << 30
    """Bytes of tensor data or of a graph in one command."""


GENEROUS = Limits()
