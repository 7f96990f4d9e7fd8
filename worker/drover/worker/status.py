"""What a worker says of itself: whether it is ready, its state for people and the operator, its figures for Prometheus.

Asked at any time, from before the kernels are compiled until the process ends; no question waits for a computation.
"""

from collections.abc import Sequence
from typing import Any, Literal

import drover
from drover.metrics import Figure, single
from drover.rpc.versions import CURRENT, Version
from drover.worker.memory import SharedDevice
from drover.worker.server import Presence, Server
from drover.worker.store import Store
from drover.worker.tally import Tally

Phase = Literal["starting", "serving", "stopping"]
Json = dict[str, Any]

PATIENCE = 0.5
"""Seconds to wait for a device that computes before its last known figures do."""
_WHY_NOT = {
    "starting": "the kernels are being compiled or loaded and the cache is opened; the RPC port is not open yet",
    "serving": None,
    "stopping": "the worker is stopping",
}


class Status:
    """The worker as others see it."""

    def __init__(self, tally: Tally, versions: tuple[Version, Version | None] = (CURRENT, None)) -> None:
        self._versions = versions
        self.phase: Phase = "starting"
        self._tally = tally
        self._devices: Sequence[SharedDevice] = ()
        self._memory: dict[int, tuple[int, int]] = {}
        self._server: Server | None = None
        self._store: Store | None = None

    def opened(self, devices: Sequence[SharedDevice], server: Server, store: Store | None) -> None:
        """The RPC port is open: from now on the worker is ready."""
        self._devices, self._server, self._store = devices, server, store
        if self.phase == "starting":
            self.phase = "serving"

    def stopping(self) -> None:
        """It accepts no more clients."""
        self.phase = "stopping"

    def why_not_ready(self) -> str | None:
        """Why clients must wait or look elsewhere; None if they need not."""
        return _WHY_NOT[self.phase]

    def state(self) -> Json:
        """Everything, for /state."""
        counts = self._tally.counts
        return {
            "version": drover.__version__,
            "protocol": str(self._versions[0]),
            "alsoProtocol": str(self._versions[1]) if self._versions[1] else None,
            "phase": self.phase,
            "ready": self.phase == "serving",
            "devices": [
                {"name": shared.device.name, "description": shared.device.description, "free": free, "total": total}
                for shared, (free, total) in zip(self._devices, self._figures_of_memory(), strict=True)
            ],
            "clients": [self._client(row) for row in self._clients()],
            "connections": counts.connections,
            "received": counts.received,
            "sent": counts.sent,
            "graphs": counts.graphs,
            "nodes": counts.nodes,
            "refused": self._tally.refused,
            "computeSeconds": round(counts.compute_seconds, 6),
            "cache": None
            if self._store is None
            else {
                "folder": str(self._store.folder),
                "bytes": self._store.used,
                "limit": self._store.limit,
                "evictions": self._store.evictions,
                "hits": counts.hits,
                "misses": counts.misses,
                "hitBytes": counts.hit_bytes,
                "missBytes": counts.miss_bytes,
            },
        }

    def figures(self) -> list[Figure]:
        """Everything that can be counted, for /metrics."""
        counts = self._tally.counts
        clients = self._clients()
        rows: list[tuple[str, str, Literal["counter", "gauge"], float]] = [
            ("ready", "Whether clients are accepted.", "gauge", self.phase == "serving"),
            ("clients", "Clients connected now.", "gauge", len(clients)),
            ("connections", "Clients that have connected.", "counter", counts.connections),
            ("received_bytes", "Bytes received from clients.", "counter", counts.received),
            ("sent_bytes", "Bytes sent to clients.", "counter", counts.sent),
            ("graphs", "Graphs computed.", "counter", counts.graphs),
            ("graph_nodes", "Nodes of the graphs computed.", "counter", counts.nodes),
            ("compute_seconds", "Seconds spent computing graphs.", "counter", counts.compute_seconds),
            ("cache_hits", "Tensors that came from the weight cache.", "counter", counts.hits),
            ("cache_misses", "Tensors that the weight cache lacked.", "counter", counts.misses),
            ("cache_hit_bytes", "Bytes that came from the weight cache.", "counter", counts.hit_bytes),
            ("cache_miss_bytes", "Bytes of weights that clients had to send.", "counter", counts.miss_bytes),
            *self._cache_figures(),
        ]
        simple = [single(f"drover_worker_{name}", text, kind, value) for name, text, kind, value in rows]
        return [*simple, *self._wire_figures(), *self._device_figures(clients)]

    def _wire_figures(self) -> list[Figure]:
        commands = self._tally.commands
        frames = tuple(((name,), float(traffic.frames)) for name, traffic in commands.items())
        sizes = tuple(
            ((name, direction), float(size))
            for name, traffic in commands.items()
            for direction, size in (("received", traffic.received), ("sent", traffic.sent))
        )
        refused = tuple(((reason,), float(count)) for reason, count in self._tally.refused.items())
        return [
            Figure("drover_worker_commands", "Commands served.", "counter", frames, labels=("command",)),
            Figure(
                "drover_worker_command_bytes",
                "Bytes of the commands served and of their answers.",
                "counter",
                sizes,
                labels=("command", "direction"),
            ),
            Figure("drover_worker_refused", "What was refused, by reason.", "counter", refused, labels=("reason",)),
        ]

    def _cache_figures(self) -> list[tuple[str, str, Literal["counter", "gauge"], float]]:
        used, limit, evictions = (0, 0, 0)
        if self._store is not None:
            used, limit, evictions = self._store.used, self._store.limit, self._store.evictions
        return [
            ("cache_evictions", "Tensors removed from the weight cache to make room.", "counter", evictions),
            ("cache_bytes", "Bytes kept in the weight cache.", "gauge", used),
            ("cache_limit_bytes", "Most bytes that the weight cache keeps.", "gauge", limit),
        ]

    def _device_figures(self, clients: Sequence[Presence]) -> list[Figure]:
        memory = self._figures_of_memory()
        names = [(str(index), shared.device.name) for index, shared in enumerate(self._devices)]
        held = [float(sum(row.held[index].bytes for row in clients)) for index in range(len(names))]
        return [
            Figure(
                "drover_worker_buffer_bytes",
                "Bytes of buffers that clients hold.",
                "gauge",
                tuple(zip(names, held, strict=True)),
                labels=("device", "name"),
            ),
        ] + [
            Figure(
                f"drover_worker_device_{word}_bytes",
                f"Bytes of device memory that are {text}.",
                "gauge",
                tuple((name, float(pair[position])) for name, pair in zip(names, memory, strict=True)),
                labels=("device", "name"),
            )
            for position, (word, text) in enumerate((("free", "free"), ("total", "offered")))
        ]

    def _figures_of_memory(self) -> list[tuple[int, int]]:
        """Free and total bytes of each device; those of last time where a computation holds it."""
        for index, shared in enumerate(self._devices):
            if shared.lock.acquire(timeout=PATIENCE):
                try:
                    self._memory[index] = shared.device.memory()
                finally:
                    shared.lock.release()
        return [self._memory.get(index, (0, 0)) for index in range(len(self._devices))]

    def _clients(self) -> list[Presence]:
        return [] if self._server is None else self._server.present()

    @staticmethod
    def _client(row: Presence) -> Json:
        return {
            "peer": row.peer,
            "doing": row.doing or None,
            "requests": row.requests,
            "received": row.received,
            "sent": row.sent,
            "bufferBytes": sum(held.bytes for held in row.held),
            "holds": [
                {"device": index, "buffers": held.buffers, "bytes": held.bytes, "graphs": held.graphs}
                for index, held in enumerate(row.held)
            ],
        }
