"""The operator and a thousand InferenceClusters, on an API server alone: no controllers, no scheduler, no node.

usage: python tests/bench_operator.py [--clusters 1000] [--rate 8] [--namespaces 10] [--burst 200] [--idle 60]
[--threads 4] [--json FILE] [--log FILE]. Four phases: clusters arrive one after another at a fixed rate; nothing
happens; more arrive at once; the operator starts anew. Seconds are from an apply to the last of the objects that the
operator's first cycles make, as watches tell of them. Needs what `make e2e` needs, and nothing else running meanwhile.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from cluster import network, node, state
from cluster.cache import ClusterUnavailableError, locked
from cluster.direct import Direct, Object
from drover.spec import KIND
from drover_operator import cluster, crd, desired, names, target
from support.processes import Running, free_port

SAMPLE: Object = yaml.safe_load((Path(__file__).parents[1] / "manifests/samples/tinyllama.yaml").read_text())
DEFAULTS = target.Defaults("drover-worker:bench")
PREFIX, PLURAL = cluster.PATHS[KIND]
WRITES = {"APPLY", "CREATE", "DELETE", "DELETECOLLECTION", "PATCH", "POST", "PUT", "UPDATE"}
OWN = {"leases", "ipaddresses"}
"""Resources that an API server writes by itself: that it is there, and the address of each Service."""
PATIENCE = 600
"""Seconds until something that ought to happen is given up."""
SENDERS = 8
"""Connections of a burst."""
Key = tuple[str, str]
Place = tuple[str, str, str]


class MeasureError(Exception):
    """A figure that cannot be had, and why."""


@dataclass(slots=True)
class Arrival:
    """A cluster that was applied: when that was sent, when it was answered, when its last object was seen."""

    missing: set[Place]
    sent: float = 0.0
    taken: float = 0.0
    there: float = 0.0


@dataclass(slots=True)
class Sight:
    """Which objects there are, as watches tell of them; any thread may call."""

    arrivals: dict[Key, Arrival] = field(default_factory=dict)
    _owners: dict[Place, Key] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def watch(self, kubeconfig: Path, kind: str) -> None:
        """See objects of one kind from now on."""
        prefix, plural = cluster.PATHS[kind]

        def look() -> None:
            for event in Direct(kubeconfig).watch(f"/{prefix}/{plural}", names.EVERY):
                if event["type"] == "ADDED":
                    metadata = event["object"]["metadata"]
                    self._saw((kind, metadata["namespace"], metadata["name"]), time.monotonic())

        threading.Thread(target=look, name=f"watch-{plural}", daemon=True).start()

    def expect(self, key: Key, places: set[Place]) -> None:
        """A cluster that is about to be applied, and what belongs to it."""
        with self._changed:
            self.arrivals[key] = Arrival(places)
            self._owners |= dict.fromkeys(places, key)

    def wait(self, keys: Sequence[Key]) -> None:
        """Wait until all of these are there."""
        left = [self.arrivals[key] for key in keys]
        with self._changed:
            if not self._changed.wait_for(lambda: all(not arrival.missing for arrival in left), PATIENCE):
                late = [arrival for arrival in left if arrival.missing]
                raise MeasureError(f"{len(late)} clusters lack objects after {PATIENCE} s: {late[0].missing}")

    def _saw(self, place: Place, now: float) -> None:
        with self._changed:
            key = self._owners.pop(place, None)
            if key is None:
                return
            arrival = self.arrivals[key]
            arrival.missing.discard(place)
            if not arrival.missing:
                arrival.there = now
                self._changed.notify_all()


class Operator:
    """The operator of this checkout as a process, and what it says of itself."""

    def __init__(self, kubeconfig: Path, log: Path, threads: int) -> None:
        self._metrics, health = free_port(), free_port()
        ports = ["--health-port", str(health), "--metrics-port", str(self._metrics)]
        command = [
            sys.executable,
            "-m",
            "drover_operator",
            "run",
            "--image",
            DEFAULTS.image,
            "--threads",
            str(threads),
            *ports,
        ]
        self.started = time.monotonic()
        self.running = Running(command, log, {"KUBECONFIG": str(kubeconfig)})
        self.pid = self.running.popen.pid

    def figures(self) -> dict[str, float]:
        """What it counts, by name without the prefix; empty as long as it does not answer."""
        if not self.running.alive:
            raise MeasureError(f"the operator has ended: {self.running.describe()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        rows = [row for family in text_string_to_metric_families(text) for row in family.samples if not row.labels]
        return {row.name.removeprefix("drover_operator_"): row.value for row in rows}

    def memory(self) -> tuple[float, float]:
        """MB resident now, and at most so far."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        rows = dict(line.split(":", 1) for line in text.splitlines())
        now, peak = (int(rows[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))
        return now, peak


@dataclass(slots=True)
class Bench:
    """All that takes part."""

    kubeconfig: Path
    operator: Operator
    namespaces: Sequence[str]
    sight: Sight = field(default_factory=Sight)
    api: Direct = field(init=False)

    def __post_init__(self) -> None:
        self.api = Direct(self.kubeconfig)

    def announce(self, numbers: Iterable[int]) -> list[Key]:
        """Clusters that are about to be applied."""
        keys = [(self.namespaces[number % len(self.namespaces)], f"herd-{number:05}") for number in numbers]
        for key in keys:
            self.sight.expect(key, parts(key))
        return keys

    def arrive(self, key: Key, api: Direct) -> None:
        """Apply one cluster."""
        arrival = self.sight.arrivals[key]
        arrival.sent = time.monotonic()
        api.apply(f"/{PREFIX}/namespaces/{key[0]}/{PLURAL}/{key[1]}", manifest(key))
        arrival.taken = time.monotonic()

    def quiet(self, seconds: float = 5.0) -> None:
        """Wait until the operator has nothing to do and nobody has written for some seconds."""
        deadline, before, since = time.monotonic() + PATIENCE, Counter[tuple[str, str]](), time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(0.5)
            now = writes(self.api.requests())
            if now != before or self.operator.figures().get("queue_length") != 0:
                before, since = now, time.monotonic()
            if since > deadline:
                raise MeasureError(f"it does not come to rest within {PATIENCE} s")

    def processors(self) -> dict[str, float]:
        """Seconds of processor time so far, by who used them; `machine` is all that anybody used."""
        used = {"operator": seconds_of(self.operator.pid), "bench": time.process_time(), "machine": machine_seconds()}
        for pid in network.processes():
            part = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode()
            if part in ("apiserver", "etcd"):
                used[part] = seconds_of(pid)
        if len(used) != 5:
            raise MeasureError(f"API server and etcd are not both running: found {sorted(used)}")
        return used


def manifest(key: Key) -> Object:
    """The sample under another name."""
    return {**SAMPLE, "metadata": {"namespace": key[0], "name": key[1]}}


def parts(key: Key) -> set[Place]:
    """What the operator makes of a cluster as long as no pod is there."""
    metadata = {"namespace": key[0], "name": key[1], "uid": "any"}
    made = desired.objects(target.read({**SAMPLE, "metadata": metadata}, DEFAULTS), desired.Stage(reads="any"))
    return {(part["kind"], key[0], part["metadata"]["name"]) for part in made}


def writes(requests: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Those of the requests that write, but for what the API server writes by itself."""
    return Counter({key: count for key, count in requests.items() if key[0] in WRITES and key[1] not in OWN})


def arrivals(bench: Bench, options: argparse.Namespace) -> Object:
    """Phase 1: clusters one after another at a fixed rate."""
    keys = bench.announce(range(options.clusters))
    requests, used, counted = bench.api.requests(), bench.processors(), bench.operator.figures()
    begun = time.monotonic()
    for number, key in enumerate(keys):
        time.sleep(max(0.0, begun + number / options.rate - time.monotonic()))
        bench.arrive(key, bench.api)
    ended = time.monotonic()
    bench.sight.wait(keys)
    found = spread(bench, keys) | {"rate": round((len(keys) - 1) / (ended - begun), 2)}
    found |= shares(used, bench.processors(), time.monotonic() - begun)
    bench.quiet()
    asked = bench.api.requests() - requests
    calls: Counter[str] = Counter()
    for (verb, resource), count in asked.items():
        if verb not in ("WATCH", "LIST") and resource and resource not in OWN:
            calls[verb] += count
    calls["APPLY"] -= len(keys)
    cycles = bench.operator.figures()["reconciles_total"] - counted["reconciles_total"]
    now, peak = bench.operator.memory()
    return found | {
        "calls for each": {verb: round(count / len(keys), 2) for verb, count in sorted(calls.items()) if count > 0},
        "cycles for each": round(cycles / len(keys), 2),
        "operator MB": round(now, 1),
        "operator MB at most": round(peak, 1),
    }


def idle(bench: Bench, options: argparse.Namespace) -> Object:
    """Phase 2: nothing happens."""
    bench.quiet()
    requests, counted, used = bench.api.requests(), bench.operator.figures(), bench.processors()
    time.sleep(options.idle)
    written = writes(bench.api.requests() - requests)
    return {
        "seconds": options.idle,
        "writes that the API server counts": sum(written.values()),
        "writes that the operator counts": bench.operator.figures()["writes_total"] - counted["writes_total"],
        "operator MB": round(bench.operator.memory()[0], 1),
        "operator processor seconds": round(bench.processors()["operator"] - used["operator"], 2),
    }


def burst(bench: Bench, options: argparse.Namespace) -> Object:
    """Phase 3: many at once, over several connections."""
    keys = bench.announce(range(options.clusters, options.clusters + options.burst))
    used, begun = bench.processors(), time.monotonic()

    def send(share: Sequence[Key]) -> None:
        api = Direct(bench.kubeconfig)
        for key in share:
            bench.arrive(key, api)

    senders = [threading.Thread(target=send, args=(keys[start::SENDERS],)) for start in range(SENDERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    taken = time.monotonic() - begun
    bench.sight.wait(keys)
    whole = time.monotonic() - begun
    found = spread(bench, keys) | {"all taken after": round(taken, 2), "all there after": round(whole, 2)}
    return found | shares(used, bench.processors(), whole)


def restart(bench: Bench, options: argparse.Namespace, log: Path) -> Object:
    """Phase 4: the operator starts anew with all of them there."""
    bench.quiet()
    before = writes(bench.api.requests())
    begun = time.monotonic()
    bench.operator.running.stop(signal.SIGTERM)
    stopped = time.monotonic() - begun
    bench.operator = Operator(bench.kubeconfig, log, options.threads)
    count = len(bench.sight.arrivals)

    def through() -> bool:
        figures = bench.operator.figures()
        return figures.get("reconciles_total", 0) >= count and figures["queue_length"] == 0

    until("it has been through its first cycles", through)
    seconds, used = time.monotonic() - bench.operator.started, seconds_of(bench.operator.pid)
    bench.quiet()
    written = writes(bench.api.requests()) - before
    now, peak = bench.operator.memory()
    return {
        "clusters": count,
        "seconds to stop": round(stopped, 2),
        "seconds until through": round(seconds, 2),
        "operator processor seconds": round(used, 2),
        "writes that the API server counts": sum(written.values()),
        "writes that the operator counts": bench.operator.figures()["writes_total"],
        "operator MB": round(now, 1),
        "operator MB at most": round(peak, 1),
    }


def spread(bench: Bench, keys: Sequence[Key]) -> Object:
    """Seconds from apply to objects."""
    rows = [bench.sight.arrivals[key] for key in keys]
    found = {}
    for name, seconds in (
        ("since it was answered", [row.there - row.taken for row in rows]),
        ("since it was sent", [row.there - row.sent for row in rows]),
    ):
        cut = statistics.quantiles(seconds, n=100, method="inclusive")
        found[name] = {"p50": round(cut[49], 3), "p95": round(cut[94], 3), "max": round(max(seconds), 3)}
    return {"clusters": len(rows), **found}


def shares(before: dict[str, float], after: dict[str, float], seconds: float) -> Object:
    """Processor seconds of everybody, and of others than those who take part."""
    used = {name: after[name] - before[name] for name in before}
    used["others"] = max(0.0, used["machine"] - sum(used[name] for name in used if name != "machine"))
    processors = os.cpu_count() or 1
    rows = {name: round(value, 2) for name, value in used.items()}
    return {"processor seconds": rows, "machine busy": round(used["machine"] / seconds / processors, 3)}


def seconds_of(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Processor seconds of this machine that were not idle."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise MeasureError(f"waited {PATIENCE} s until {what}")
        time.sleep(0.05)


def measure(options: argparse.Namespace, log: Path) -> Object:
    """All phases, on an API server that is up."""
    kubeconfig = node.kubeconfig()
    setup = Direct(kubeconfig)
    definition = crd.definition()
    setup.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}", definition)
    spaces = [f"farm-{number}" for number in range(options.namespaces)]
    for name in spaces:
        setup.apply(f"/api/v1/namespaces/{name}", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    until("InferenceClusters are served", lambda: answers(setup, f"/{PREFIX}/{PLURAL}"))
    bench = Bench(kubeconfig, Operator(kubeconfig, log, options.threads), spaces)
    try:
        for kind in sorted({kind for kind, *_ in parts(("any", "any"))}):
            bench.sight.watch(kubeconfig, kind)
        until("the operator answers", lambda: bool(bench.operator.figures()))
        (first,) = bench.announce([options.clusters + options.burst])
        bench.arrive(first, bench.api)
        bench.sight.wait([first])
        bench.quiet()
        found: Object = {"load before": os.getloadavg()[0]}
        phases = {"arrivals": arrivals, "idle": idle, "burst": burst}
        for name, phase in phases.items():
            found[name] = say(name, phase(bench, options))
        found["restart"] = say("restart", restart(bench, options, log.with_suffix(".restart.log")))
        return found | {"load after": os.getloadavg()[0]}
    finally:
        bench.operator.running.stop()


def answers(api: Direct, path: str) -> bool:
    """Whether there is something at a path."""
    try:
        return bool(api.get(path))
    except ConnectionError:
        return False


def say(name: str, found: Object) -> Object:
    """Print what a phase found."""
    shown = Table(title=name, show_header=False, title_justify="left")
    for what, value in found.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for index, (more, figure) in enumerate(rows):
            shown.add_row(what if index == 0 else "", more, f"{figure:g}")
    Console().print(shown)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and leave nothing behind."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with locked(state.LOCK), tempfile.TemporaryDirectory() as folder:
            try:
                node.up_alone()
                found = measure(options, options.log or Path(folder) / "operator.log")
            finally:
                node.down()
    except (ClusterUnavailableError, MeasureError, ConnectionError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=8, help="clusters applied in a second")
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--burst", type=int, default=200, help="clusters applied at once")
    parser.add_argument("--idle", type=float, default=60, help="seconds to watch that nothing is written")
    parser.add_argument("--threads", type=int, default=4, help="of the operator")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--log", type=Path, help="where the operator's log goes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
