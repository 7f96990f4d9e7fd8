"""Layout: which share of the layers each device of each worker takes, and what that is for clients. Pure.

Shares follow the memory that devices offer in all, not what is free, so that asking again while a model is loaded
gives the same answer; and a layout that was published stays while every device offers about what it did then: a model
is not loaded again for a few MiB.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from drover.errors import PlanError
from drover.spec import Spec
from drover_operator import names

GIB = 1 << 30
ALL_LAYERS = 999
LEAST = 0.01
NEARLY = 0.05
"""Devices whose memory changed by less than this keep their shares."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker that is to be: its pod, the kind of its devices, its address."""

    worker: str
    device: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Share:
    """One device of one worker: what it offers, in bytes, and its proportion of the layers.

    `basis` is what it offered when its proportion was chosen, if it offers something else since.
    """

    worker: str
    device: str
    endpoint: str
    total: int
    proportion: float = 0.0
    basis: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """All shares, in the order of the plan; `pods` are the uids of the pods that were asked."""

    shares: tuple[Share, ...]
    pods: tuple[tuple[str, str], ...]
    explicit: bool = False
    """Whether the proportions are the spec's own."""

    @property
    def endpoints(self) -> list[str]:
        """The workers' addresses, each once."""
        return list(dict.fromkeys(share.endpoint for share in self.shares))

    @property
    def proportions(self) -> str:
        """As --tensor-split and LLAMA_ARG_TENSOR_SPLIT take it."""
        return ",".join(f"{share.proportion:g}" for share in self.shares)

    @property
    def settings(self) -> dict[str, str]:
        """What makes a stock llama-server split the same way, as environment variables."""
        return {
            "LLAMA_ARG_RPC": ",".join(self.endpoints),
            "LLAMA_ARG_TENSOR_SPLIT": self.proportions,
            "LLAMA_ARG_N_GPU_LAYERS": str(ALL_LAYERS),
        }

    @property
    def arguments(self) -> str:
        """The same as arguments."""
        return f"--rpc {','.join(self.endpoints)} --tensor-split {self.proportions} --n-gpu-layers {ALL_LAYERS}"

    def to_json(self) -> str:
        """For the ConfigMap."""
        shares = [{name: part for name, part in asdict(share).items() if part is not None} for share in self.shares]
        return json.dumps({"shares": shares, "pods": dict(self.pods), "explicit": self.explicit}, indent=1)


def from_json(text: str) -> Layout | None:
    """A published layout; None for anything that is not one."""
    try:
        data = json.loads(text)
        return Layout(tuple(Share(**share) for share in data["shares"]), tuple(data["pods"].items()), data["explicit"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def seats(spec: Spec, cluster: str, namespace: str) -> list[Seat]:
    """Every worker, in the order of the plan."""
    return [
        Seat(
            names.worker(cluster, group.name, index),
            group.device,
            f"{names.host(cluster, group.name, index, namespace)}:{names.RPC_PORT}",
        )
        for group in spec.workers
        for index in range(group.replicas)
    ]


def of(
    spec: Spec,
    places: Sequence[Seat],
    totals: Mapping[str, Sequence[int]],
    pods: Mapping[str, str],
    before: Layout | None = None,
) -> Layout:
    """The layout of workers that offer `totals` (for each worker, bytes of each device); PlanError if none is possible.

    `before` is the one that was published; where it still fits it keeps its shares.
    """
    devices = [
        Share(seat.worker, _device(seat, index, len(totals[seat.worker])), seat.endpoint, total)
        for seat in places
        for index, total in enumerate(totals[seat.worker])
    ]
    given = spec.split.proportions
    if given is not None and len(given) != len(devices):
        raise PlanError(
            f"spec.split.proportions has {len(given)} numbers, and the workers have {len(devices)} devices: give one "
            "for each"
        )
    if given is None and not any(device.total for device in devices):
        raise PlanError("no worker offers any memory; give spec.workers[].memory, or nodes that have some")
    known = tuple(pods.items())
    if given is None and before is not None and not before.explicit and _about_the_same(before.shares, devices):
        return replace(before, shares=tuple(map(_still, before.shares, devices)), pods=known)
    shares = given if given is not None else [round(device.total / GIB, 2) or LEAST for device in devices]
    placed = (replace(device, proportion=float(share)) for device, share in zip(devices, shares, strict=True))
    return Layout(tuple(placed), known, given is not None)


def is_for(layout: Layout, spec: Spec, places: Sequence[Seat]) -> bool:
    """Whether a published layout is about these workers and shares layers out as the spec says."""
    given = spec.split.proportions
    if layout.endpoints != [seat.endpoint for seat in places] or layout.explicit != (given is not None):
        return False
    return given is None or given == [share.proportion for share in layout.shares]


def _about_the_same(before: Sequence[Share], now: Sequence[Share]) -> bool:
    if [(old.worker, old.device, old.endpoint) for old in before] != [(s.worker, s.device, s.endpoint) for s in now]:
        return False
    return all(abs(_basis(old) - new.total) <= NEARLY * _basis(old) for old, new in zip(before, now, strict=True))


def _still(before: Share, now: Share) -> Share:
    """The share of a device that offers about what it did."""
    basis = _basis(before)
    return replace(before, total=now.total, basis=None if basis == now.total else basis)


def _basis(share: Share) -> int:
    return share.total if share.basis is None else share.basis


def _device(seat: Seat, index: int, count: int) -> str:
    return f"{seat.device}:{index}" if count > 1 else seat.device
