"""The InferenceCluster (drover.dev/v1alpha1) as pydantic models: the one definition of what a user may ask for.

`drover up`, the operator and the CRD share it: the docstrings below are the descriptions that `kubectl explain` shows.
No I/O here; `spec_file` reads files. What only means something on one machine, or only on Kubernetes, says so; the
other side takes no notice of it. Rules that only the API server can hold stand in `drover_operator.crd`.
"""

import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

from drover.errors import DroverError
from drover.sizes import parse_size
from drover.sources import FORMS

API_VERSION = "drover.dev/v1alpha1"
KIND = "InferenceCluster"

MOST_GROUPS = 32
MOST_REPLICAS = 256

Path = tuple[str | int, ...]
"""Where a field stands: ("spec", "workers", 0, "memory")."""


class FieldError(ValueError):
    """A rule over several fields failed; `place` is relative to the model that checked it."""

    def __init__(self, place: Path, text: str) -> None:
        super().__init__(text)
        self.place = place


def _size(value: object) -> object:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except DroverError as error:
            raise ValueError(str(error)) from None
    return value


_SIZE_SCHEMA = {
    "type": ["integer", "string"],
    "pattern": r"^[0-9]{1,18}(\.[0-9]{1,18})? *[KMGTkmgt]?i?[Bb]?$",
    "minimum": 1,
    "maxLength": 48,
}

Size = Annotated[int, BeforeValidator(_size), Field(gt=0), WithJsonSchema(_SIZE_SCHEMA)]
"""Bytes; written "4GiB" or as a plain number."""
Quantity = Annotated[
    int | Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i|[eE][0-9]+)?$", max_length=48)],
    WithJsonSchema({"type": ["integer", "string"], "maxLength": 48}),
]
"""An amount as Kubernetes writes it: 4, "500m", "8Gi"."""
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=2147483647)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Words = dict[str, Annotated[str, Field(max_length=1024)]]
Free = dict[str, Any]
"""A part of the Kubernetes API, handed on as it stands."""
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]


class _Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class Metadata(_Model):
    """What Kubernetes keeps beside the spec; only the name matters here."""

    model_config = ConfigDict(extra="ignore")

    name: Label


class SecretKey(_Model):
    """A key of a Secret in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """The Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """The key in it."""


class TokenRef(SecretKey):
    """A token kept in a Secret in the same namespace."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "token"
    """The key in it."""


class CertificatesRef(_Model):
    """Certificates kept in a ConfigMap in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """The ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253)] = "ca.crt"
    """The key in it: certificates in PEM form."""


class LocalReference(_Model):
    """An object in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Its name."""


class EnvVar(_Model):
    """An environment variable of a container."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """The variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Its value."""
    value_from: Free | None = None
    """Or where the value comes from, as in a Kubernetes container."""


class Storage(_Model):
    """A volume to be made. Kubernetes only."""

    size: Size | None = None
    """How large, e.g. 20GiB; units are powers of 1024. Needed on Kubernetes."""
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None
    """The StorageClass; by default the cluster's default one."""
    access_mode: AccessMode = "ReadWriteOnce"
    """ReadWriteMany lets pods on several nodes share it."""


class Model(_Model):
    """The GGUF file to run."""

    source: Text
    """hf://ORG/REPO/FILE.gguf[@REVISION], https://HOST/PATH, pvc://CLAIM/PATH.gguf or ollama://[OWNER/]NAME[:TAG]; of a
    file in parts, the first part. For `drover up` also a path, relative to the file that holds this."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)] | None = None
    """What the file must hash to."""
    alias: Text | None = None
    """The model's name in the API; by default the file's."""
    secret_ref: TokenRef | None = None
    """The token to download with. Kubernetes only."""
    ca_config_map_ref: CertificatesRef | None = None
    """Authorities to trust beside the public ones, for a server of one's own. Kubernetes only."""
    env: Annotated[list[EnvVar], Field(max_length=64)] | None = None
    """Environment of the download: HTTPS_PROXY, or HF_ENDPOINT for a mirror. Kubernetes only."""
    storage: Storage = Storage()
    """Where what is downloaded is kept."""

    @property
    def scheme(self) -> str:
        """hf, https, pvc, ollama, or "" for a path."""
        return self.source.partition("://")[0] if "://" in self.source else ""

    @model_validator(mode="after")
    def _known_source(self) -> typing.Self:
        if self.scheme in FORMS:
            pattern, words = FORMS[self.scheme]
            if not pattern.fullmatch(self.source):
                raise FieldError(("source",), f"{self.source!r} does not look like {words}")
        elif self.scheme:
            known = ", ".join(words for _, words in FORMS.values())
            raise FieldError(("source",), f"{self.source!r} has an unknown scheme; give {known}, or a path")
        return self


class CacheTypes(_Model):
    """Element types of the KV cache."""

    k: CacheType = "f16"
    """Of the keys."""
    v: CacheType = "f16"
    """Of the values."""


class WeightCache(Storage):
    """Weights kept on a worker's disk under their hash, so that the next load sends none."""

    enabled: bool = True
    """Whether to keep them."""
    retain: bool = True
    """Whether the volumes stay when the InferenceCluster is deleted or scaled down. Kubernetes only."""


class Resources(_Model):
    """Requests and limits of a container. Kubernetes only."""

    requests: dict[str, Quantity] | None = None
    """What the scheduler sets aside, e.g. {cpu: 4, memory: 8Gi}."""
    limits: dict[str, Quantity] | None = None
    """What the container may use at most."""


class Toleration(_Model):
    """A taint of nodes that the pods put up with."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """The taint's key; none tolerates all, with operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """How key and value are compared; by default Equal."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; none means every one."""
    toleration_seconds: int | None = None
    """How long NoExecute is put up with."""


class PodTemplate(_Model):
    """Changes to pods, merged over what the operator makes as a strategic merge patch would be."""

    metadata: Free | None = None
    """Labels and annotations to add."""
    spec: Free | None = None
    """Parts of a PodSpec; containers, volumes and the like are matched by name."""


class WorkerGroup(_Model):
    """Workers that are alike; on one machine each is a process, on Kubernetes a pod of a StatefulSet."""

    name: Label
    """Names the group; on Kubernetes its objects are called CLUSTER-GROUP."""
    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = 1
    """How many workers."""
    device: Literal["cpu", "cuda", "reference"] = "cpu"
    """What computes."""
    devices_per_worker: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs of each worker; more than one with cuda only."""
    threads: Count | None = None
    """Threads of each worker; by default all cores it may use."""
    memory: Size | None = None
    """Bytes each worker offers; by default what its device has."""
    cache: WeightCache = WeightCache(enabled=False)
    """Whether weights are kept on disk; on Kubernetes on a volume for each worker."""
    port: Port | None = None
    """Of the first worker, the others follow; by default any free ones. `drover up` only."""
    resources: Resources = Resources()
    """Requests and limits of a worker; a GPU for each device is added."""
    node_selector: Words | None = None
    """Labels that a node must have. Kubernetes only."""
    tolerations: Annotated[list[Toleration], Field(max_length=64)] | None = None
    """Taints of nodes that the workers put up with. Kubernetes only."""
    affinity: Free | None = None
    """As in a Kubernetes pod; by default workers of a group prefer different nodes."""
    topology_spread_constraints: Annotated[list[Free], Field(max_length=32)] | None = None
    """As in a Kubernetes pod."""
    runtime_class_name: Annotated[str, Field(max_length=253)] | None = None
    """The container runtime to use, e.g. nvidia. Kubernetes only."""
    priority_class_name: Annotated[str, Field(max_length=253)] | None = None
    """The priority of the pods. Kubernetes only."""
    image: Text | None = None
    """The workers' image, in place of the cluster's. Kubernetes only."""
    env: Annotated[list[EnvVar], Field(max_length=256)] | None = None
    """More environment variables of the workers. Kubernetes only."""
    pod_template: PodTemplate | None = None
    """Changes to the workers' pods. Kubernetes only."""

    @model_validator(mode="after")
    def _consistent(self) -> typing.Self:
        if self.devices_per_worker > 1 and self.device != "cuda":
            raise FieldError(("devicesPerWorker",), f"a {self.device} worker has one device; only cuda can have more")
        return self


class Split(_Model):
    """How layers are shared out."""

    proportions: (
        Annotated[
            list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1, max_length=MOST_REPLICAS)
        ]
        | None
    ) = None
    """A number for every device of every worker, in the order of the groups; by default their free memory."""


class Serving(_Model):
    """The OpenAI-compatible API."""

    enabled: bool = True
    """Whether to serve; the workers are there for other clients in any case."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Coordinator pods; each has a KV cache of its own on the workers. Kubernetes only."""
    host: Annotated[str, Field(max_length=253)] = "127.0.0.1"
    """The address to listen on. `drover up` only."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Of the API; for `drover up`, 0 takes any free one."""
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """The kind of Service before it. Kubernetes only."""
    node_port: Port | None = None
    """The port on every node; with the types NodePort and LoadBalancer. Kubernetes only."""
    api_key: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """What clients must send. `drover up` only: on Kubernetes it belongs in a Secret, see apiKeySecretRef."""
    api_key_secret_ref: SecretKey | None = None
    """Where what clients must send is kept. Kubernetes only."""
    resources: Resources = Resources()
    """Requests and limits of a coordinator."""
    image: Text | None = None
    """The coordinators' image, in place of the cluster's. Kubernetes only."""

    @model_validator(mode="after")
    def _one_key(self) -> typing.Self:
        if self.api_key is not None and self.api_key_secret_ref is not None:
            raise FieldError(("apiKey",), "stands beside apiKeySecretRef; keep one of them")
        return self


class Network(_Model):
    """Who may reach the workers, whose protocol asks nobody for a name. Kubernetes only."""

    policy: bool = True
    """Whether a NetworkPolicy lets only the coordinators and `allowFrom` in."""
    allow_from: Annotated[list[Free], Field(max_length=64)] | None = None
    """More clients of the RPC port: NetworkPolicyPeers, as in a Kubernetes NetworkPolicy."""


class Expose(_Model):
    """Workers for clients of their own, e.g. a llama-server outside the cluster. Kubernetes only."""

    type: Literal["None", "ClusterIP", "NodePort", "LoadBalancer"] = "None"
    """The kind of Service before each worker."""


class Spec(_Model):
    """What is asked for."""

    model: Model
    """The GGUF file to run."""
    context: Count | None = None
    """Tokens; by default what the model was trained with, 4096 at most."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sequences that can be in the KV cache at a time."""
    cache_types: CacheTypes = CacheTypes()
    """Element types of the KV cache."""
    workers: Annotated[list[WorkerGroup], Field(min_length=1, max_length=MOST_GROUPS)]
    """Groups of workers; layers are laid over them in this order."""
    split: Split = Split()
    """How layers are shared out."""
    serving: Serving = Serving()
    """The OpenAI-compatible API."""
    network: Network = Network()
    """Who may reach the workers."""
    expose: Expose = Expose()
    """Workers for clients of their own."""
    suspend: bool = False
    """Scales everything to zero and keeps model and caches. Kubernetes only."""
    image: Text | None = None
    """The image of all pods; by default the operator's choice, which is of its own release, as this one has to be.
    Kubernetes only."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] | None = None
    """Secrets to pull images with. Kubernetes only."""

    @property
    def devices(self) -> int:
        """How many devices all workers have."""
        return sum(group.replicas * group.devices_per_worker for group in self.workers)

    @model_validator(mode="after")
    def _consistent(self) -> typing.Self:
        names = [group.name for group in self.workers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise FieldError(("workers", index, "name"), f"{name!r} names two groups")
        given = self.split.proportions
        if given is not None and len(given) != self.devices:
            what = "workers" if self.devices == sum(group.replicas for group in self.workers) else "devices"
            text = f"{len(given)} numbers for {self.devices} {what}; give one for each"
            raise FieldError(("split", "proportions"), text)
        if given is not None and sum(given) <= 0:
            raise FieldError(("split", "proportions"), "at least one must be above 0")
        return self


class InferenceCluster(_Model):
    """One model over several workers, as a Kubernetes resource or a file."""

    api_version: Literal["drover.dev/v1alpha1"]
    kind: Literal["InferenceCluster"]
    metadata: Metadata
    spec: Spec
