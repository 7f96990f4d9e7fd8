"""What the operator reports about an InferenceCluster, as the schema of its status. Pure data."""

from typing import Any

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "format": "int64"}
_NUMBER = {"type": "number"}


def _object(description: str, required: list[str] | None = None, **fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": fields,
        **({"required": required} if required else {}),
    }


def _said(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


_CONDITION = _object(
    "One thing that can be said of the cluster, and why.",
    ["type", "status", "reason", "message", "lastTransitionTime"],
    type=_said(_TEXT, "WorkersReady, ModelAvailable, Planned, SplitVerified, Serving or Ready."),
    status={**_said(_TEXT, "True, False or Unknown."), "enum": ["True", "False", "Unknown"]},
    reason=_said(_TEXT, "One word for programs."),
    message=_said(_TEXT, "What is the case, and what to do about it."),
    observedGeneration=_said(_COUNT, "The generation of the spec this was said of."),
    lastTransitionTime={**_said(_TEXT, "When the status last changed."), "format": "date-time"},
)

_ENDPOINTS = _object(
    "Where clients go.",
    openai=_said(_TEXT, "Base URL of the OpenAI-compatible API."),
    rpc={"type": "array", "description": "The workers, in the order of the plan.", "items": _TEXT},
    exposed={"type": "array", "description": "The workers for clients outside, in the same order.", "items": _TEXT},
    llamaServerArgs=_said(_TEXT, "What makes a stock llama-server split the model the same way."),
)

_STAGE = _object(
    "What lies on one device of a worker.",
    ["worker", "device"],
    worker=_said(_TEXT, "The pod."),
    device=_said(_TEXT, "Its device."),
    layers=_said(_TEXT, "Which layers, e.g. 0-15: foreseen from the model's header, then as they were loaded."),
    bytes=_said(_COUNT, "Bytes of weights and KV cache on it, foreseen and then found."),
    proportion=_said(_NUMBER, "Its share, in the same measure as the others'."),
)

_STAGE_FOUND = _object(
    "One device, as the load Job found it.",
    worker=_said(_TEXT, "The worker's address."),
    device=_said(_COUNT, "The number of the device there."),
    layers=_said(_TEXT, "Which layers."),
    bytes=_said(_COUNT, "Bytes of weights and KV cache."),
    memoryBefore=_said(_COUNT, "Bytes that the device said were free, before."),
    memoryAfter=_said(_COUNT, "Bytes that the device said were free, after."),
    wireSent=_said(_COUNT, "Bytes sent to it."),
    wireReceived=_said(_COUNT, "Bytes that came back."),
)

_REPORT = _object(
    "What the load Job found and measured.",
    of=_said(_TEXT, "Hash of the model, the plan and the workers that this is about."),
    ok={"type": "boolean", "description": "Whether the split was proven."},
    reason=_said(_TEXT, "One word for programs."),
    message=_said(_TEXT, "What was found."),
    predictedTokensPerSecond=_said(_NUMBER, "What that prompt ought to come to, by what was measured of each worker."),
    tokensPerSecond=_said(_NUMBER, "What a known prompt came to."),
    promptTokensPerSecond=_said(_NUMBER, "How fast that prompt was read."),
    loadSeconds=_said(_NUMBER, "From opening the file to the last weight in place."),
    bytesUploaded=_said(_COUNT, "Bytes of weights that were sent."),
    bytesCached=_said(_COUNT, "Bytes of weights that the workers had kept."),
    stages={"type": "array", "description": "What was found on each device.", "items": _STAGE_FOUND},
    fingerprint=_said(_TEXT, "Hash of the model's headers, sizes and first bytes; serving pods take no other model."),
)

_MODEL = _object(
    "The model that was downloaded.",
    of=_said(_TEXT, "Hash of its source."),
    file=_said(_TEXT, "Its file on the volume."),
    bytes=_said(_COUNT, "How large it is."),
    message=_said(_TEXT, "What is worth knowing about it."),
)

_HEADER = _object(
    "What the head of the model's file said before the model was downloaded.",
    of=_said(_TEXT, "Hash of its source, and of the settings that decide how much memory it takes."),
    bytes=_said(_COUNT, "Bytes of all its files."),
    architecture=_said(_TEXT, "Its architecture."),
    layers=_said(_COUNT, "How many layers it has."),
    units={
        "type": "array",
        "description": "What cannot be cut, the layers with their KV cache and the output head, in runs of equal size.",
        "items": {
            "type": "array",
            "description": "Bytes of a unit, and how many such units follow one another.",
            "items": _COUNT,
        },
    },
    reserve=_said(_COUNT, "Bytes that are kept free on every device to compute with."),
    message=_said(_TEXT, "The same in words."),
)

_REPLACED = _object(
    "That the model was replaced on its volume after it had been proven.",
    of=_said(_TEXT, "Hash of its source."),
    count=_said(_COUNT, "How often."),
    proven={"type": "boolean", "description": "Whether the model that is there now is proven."},
)

_FAILURES = _object(
    "How often in a row the load Job has failed, or its proof has; too often, and it waits for a change of the spec.",
    of=_said(_TEXT, "Hash of model, plan and images."),
    count=_said(_COUNT, "Failed loads."),
    job=_said(_TEXT, "The uid of the last one, or the hash of the load whose proof did not hold."),
    time={**_said(_TEXT, "When it was seen."), "format": "date-time"},
)

STATUS: dict[str, Any] = _object(
    "What is the case; written by the operator.",
    observedGeneration=_said(_COUNT, "The generation of the spec that the operator last acted on."),
    conditions={
        "type": "array",
        "description": "How far the cluster has come.",
        "items": _CONDITION,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    },
    workers=_said(_TEXT, "Ready and wanted workers, e.g. 2/2."),
    endpoints=_ENDPOINTS,
    plan={"type": "array", "description": "What lies where, in the order of the devices.", "items": _STAGE},
    report=_REPORT,
    header=_HEADER,
    model=_MODEL,
    modelReplaced=_REPLACED,
    loadFailures=_FAILURES,
)
