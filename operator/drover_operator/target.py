"""Target: an InferenceCluster as the operator sees it: the spec, and where it stands in the API server. Pure."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from drover.errors import SpecError
from drover.spec import API_VERSION, KIND, InferenceCluster, Spec
from drover.spec_file import dotted, faults

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator was started with, for what a spec leaves open."""

    image: str
    namespace: str = "drover-system"
    """Where the operator itself runs; its probe comes from there."""


@dataclass(frozen=True, slots=True)
class Target:
    """One InferenceCluster that is to be."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec
    defaults: Defaults

    @property
    def image(self) -> str:
        """The image of pods that name none of their own."""
        return self.spec.image or self.defaults.image

    @property
    def serving_image(self) -> str:
        """The image of coordinators, serving or loading."""
        return self.spec.serving.image or self.image

    @property
    def owner(self) -> Manifest:
        """The reference by which all that is made goes when the InferenceCluster goes."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


def read(body: Manifest, defaults: Defaults) -> Target:
    """A Target from the API server's object; SpecError, one line for every fault, if its spec is not valid."""
    metadata = body["metadata"]
    try:
        cluster = InferenceCluster.model_validate(
            {
                "apiVersion": body.get("apiVersion", API_VERSION),
                "kind": body.get("kind", KIND),
                "metadata": {"name": metadata["name"]},
                "spec": body.get("spec", {}),
            }
        )
    except ValidationError as error:
        raise SpecError("\n".join(f"{dotted(place)}: {text}" for place, text in faults(error))) from None
    spec = cluster.spec
    if not spec.model.scheme:
        raise SpecError(f"spec.model.source: {spec.model.source!r} is a path, which is for `drover up` only")
    return Target(
        metadata["name"],
        metadata.get("namespace", "default"),
        metadata["uid"],
        metadata.get("generation", 0),
        spec,
        defaults,
    )
