"""The API server: the only module that imports `kubernetes`. Plain JSON in, plain JSON out.

What is used of it, which is all that the operator's role must allow:

| API group | resources | verbs |
| --- | --- | --- |
| drover.dev | inferenceclusters | get, list, watch |
| drover.dev | inferenceclusters/status | patch |
| apps | statefulsets, deployments | get, list, watch, create, patch, delete |
| batch | jobs | get, list, watch, create, patch, delete |
| policy | poddisruptionbudgets | get, list, watch, create, patch, delete |
| networking.k8s.io | networkpolicies | get, list, watch, create, patch, delete |
| (core) | services | get, list, watch, create, patch, delete |
| (core) | configmaps, persistentvolumeclaims | get, list, watch, create, patch |
| (core) | pods | list, watch |
| (core) | events | create |

`list` and `watch` are also what kopf does for `handlers`. A Role for each watched namespace does instead of a
ClusterRole; neither namespaces nor CustomResourceDefinitions are read, nor Secrets: pods mount them. An apply is a
`patch`, and a `create` where there was nothing.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import structlog
import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from drover.spec import API_VERSION, KIND
from drover_operator import names
from drover_operator.errors import ExistsError, RefusedError, UnavailableError
from drover_operator.target import Manifest

log = structlog.get_logger()

PATHS = {
    "InferenceCluster": ("apis/drover.dev/v1alpha1", "inferenceclusters"),
    "StatefulSet": ("apis/apps/v1", "statefulsets"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Job": ("apis/batch/v1", "jobs"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Service": ("api/v1", "services"),
    "ConfigMap": ("api/v1", "configmaps"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "Event": ("api/v1", "events"),
}
OWNED = tuple(kind for kind in PATHS if kind not in ("InferenceCluster", "Event"))
SECONDS = 20
PAGE = 500
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
LONGEST_MESSAGE = 1000

NO_VERSION = "1"
"""A resourceVersion that no object has: an apply that names it makes an object, and never changes one."""

_FOR_GOOD = {400, 403, 404, 405, 413, 415, 422}
"""Answers that the same request would get again."""
_CONFLICT = 409
_UNTYPED = "failed to create typed patch object"
"""What it says, with status 500, of an apply that has fields of the wrong kind."""


class ApiServer:
    """A connection to the API server; any thread may call."""

    def __init__(self, dynamic: DynamicClient, reporter: str) -> None:
        self._client = dynamic
        self._reporter = reporter

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object, or None."""
        try:
            return self._ask("get", _path(kind, namespace, name)) | {"kind": kind}
        except _MissingError:
            return None

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster, its pods among them."""
        query = [("labelSelector", names.owned(name))]
        found = []
        for kind in OWNED:
            answer = self._ask("get", _path(kind, namespace), query=query)
            found += [body | {"kind": kind} for body in answer.get("items") or ()]
        return found

    def roll(self, namespaces: Sequence[str]) -> Iterator[tuple[str, Manifest]]:
        """Kind and metadata of each InferenceCluster and of all with our label; in all namespaces if none is named."""
        for kind in ("InferenceCluster", *OWNED):
            for namespace in namespaces or ("",):
                for page in self._pages(_path(kind, namespace), names.EVERY if kind in OWNED else ""):
                    yield from ((kind, item) for item in page.get("items") or ())

    def _pages(self, path: str, selector: str) -> Iterator[Manifest]:
        more = ""
        while True:
            asked = {"labelSelector": selector, "limit": str(PAGE), "continue": more}
            query = [(name, value) for name, value in asked.items() if value]
            try:
                page = self._ask("get", path, query=query, accept=METADATA)
            except _MissingError as error:
                raise UnavailableError(f"{path}: {error}") from None
            yield page
            more = page["metadata"].get("continue", "")
            if not more:
                return

    def check(self, namespaces: Sequence[str]) -> None:
        """See that InferenceClusters can be listed; UnavailableError if they are not installed or may not be."""
        for namespace in namespaces or ("",):
            try:
                self._ask("get", _path("InferenceCluster", namespace), query=[("limit", "1")])
            except _MissingError:
                raise UnavailableError(
                    "there are no InferenceClusters here: install the CustomResourceDefinition first "
                    "(python -m drover_operator crd | kubectl apply --server-side -f -)"
                ) from None
            except RefusedError as error:
                raise UnavailableError(
                    f"InferenceClusters may not be listed: {error}; check the operator's role"
                ) from None

    def make(self, manifest: Manifest) -> Manifest:
        """Server-side apply where there is nothing; ExistsError, and no change, if there is an object of this name."""
        metadata = manifest["metadata"]
        try:
            return self.apply({**manifest, "metadata": {**metadata, "resourceVersion": NO_VERSION}})
        except _ConflictError as error:
            raise ExistsError(f"{manifest['kind']} {metadata['name']}: {error}") from None

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply: what the manifest says is ours, whoever wrote it before; what the object is then."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"])
        try:
            return self._apply(path, manifest)
        except (RefusedError, _MissingError) as error:
            raise RefusedError(f"{kind} {metadata['name']}: {error}") from None

    def delete(self, body: Manifest) -> None:
        """Remove an object at once and what it owns after it; only the very one that was seen."""
        metadata = body["metadata"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        try:
            self._ask("delete", _path(body["kind"], metadata["namespace"], metadata["name"]), body=options)
        except _MissingError:
            return

    def write_status(self, body: Manifest, made: Manifest) -> Manifest | None:
        """Replace the status, and return the object as it is then; that it is gone by now is no error."""
        metadata = body["metadata"]
        whole = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "status": made,
        }
        path = _path(KIND, metadata["namespace"], metadata["name"]) + "/status"
        try:
            return self._apply(path, whole)
        except _MissingError:
            return None
        except RefusedError as error:
            raise RefusedError(f"the status of {metadata['name']}: {error}") from None

    def tell(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        """An event; one that cannot be written is logged, and that is all."""
        metadata = body["metadata"]
        now = datetime.now().astimezone().isoformat()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:LONGEST_MESSAGE],
            "source": {"component": self._reporter},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._ask("post", _path("Event", metadata["namespace"]), body=event)
        except (UnavailableError, RefusedError, _MissingError) as error:
            log.warning("event not written", reason=reason, error=str(error))

    def _apply(self, path: str, manifest: Manifest) -> Manifest:
        query = [("fieldManager", names.MANAGER), ("force", "true")]
        return self._ask("patch", path, manifest, query, content_type="application/apply-patch+yaml")

    def _ask(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        query: Sequence[tuple[str, str]] = (),
        content_type: str | None = None,
        accept: str = "application/json",
    ) -> Manifest:
        try:
            answer = self._client.request(
                method,
                path,
                body=body,
                query_params=list(query),
                content_type=content_type,
                header_params={"Accept": accept},
                serialize=False,
                _request_timeout=SECONDS,
            )
            made: Manifest = json.loads(answer.data)
            return made
        except ApiException as error:
            raise _translated(error) from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise UnavailableError(f"the API server cannot be asked: {error}") from None


class _MissingError(Exception):
    """There is no such object."""


class _ConflictError(UnavailableError):
    """The object is not what the request takes it for."""


def connect(reporter: str, threads: int = 4) -> ApiServer:
    """The API server of the pod we run in, or of KUBECONFIG; UnavailableError if neither says which."""
    settings = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            config.load_kube_config(client_configuration=settings)
    except config.ConfigException as error:
        raise UnavailableError(
            f"neither a service account nor a kubeconfig says where the API server is: {error}"
        ) from None
    settings.connection_pool_maxsize = threads + 1
    return ApiServer(DynamicClient(client.ApiClient(settings), discoverer=lambda *_: None), reporter)


def _path(kind: str, namespace: str, name: str | None = None) -> str:
    """Where an object is, or all of a kind; of all namespaces if that is ""."""
    prefix, plural = PATHS[kind]
    inside = f"namespaces/{quote(namespace, safe='')}/" if namespace else ""
    path = f"/{prefix}/{inside}{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


def _translated(error: Any) -> Exception:
    """The API server's answer as one of our own."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason or "no reason given"
    if error.status == 404:
        return _MissingError(said)
    if error.status in _FOR_GOOD or _UNTYPED in said:
        return RefusedError(said)
    kind = _ConflictError if error.status == _CONFLICT else UnavailableError
    return kind(f"the API server answered {error.status}: {said}")
