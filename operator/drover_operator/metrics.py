"""What the operator counts, for Prometheus: the only prometheus_client import of the control plane."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Cycles, errors, seconds, writes, and how many clusters wait."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._cycles = Counter("drover_operator_reconciles", "Cycles of reconciliation.", registry=self.registry)
        self._errors = Counter("drover_operator_reconcile_errors", "Cycles that failed.", registry=self.registry)
        self._writes = Counter(
            "drover_operator_writes", "Objects and statuses written or deleted.", registry=self.registry
        )
        self._seconds = Histogram(
            "drover_operator_reconcile_seconds", "Seconds a cycle took.", buckets=BUCKETS, registry=self.registry
        )
        self._waiting = Gauge("drover_operator_queue_length", "Clusters that wait.", registry=self.registry)

    def count(self, seconds: float, *, failed: bool, writes: int = 0) -> None:
        """One cycle."""
        self._cycles.inc()
        self._seconds.observe(seconds)
        if failed:
            self._errors.inc()
        self._writes.inc(writes)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Where the length of the queue is to be read."""
        self._waiting.set_function(length)

    def serve(self, port: int) -> None:
        """Answer on /metrics; 0 keeps quiet."""
        if port:
            start_http_server(port, registry=self.registry)
