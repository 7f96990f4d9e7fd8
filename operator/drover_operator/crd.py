"""The CustomResourceDefinition, made from `drover.spec`: structural schema, defaults, CEL rules, columns. Pure.

`make manifests` writes it to manifests/crd.yaml. Descriptions are the docstrings of the spec; what one field cannot
say about itself is a row of RULES, and what the operator reports is STATUS. The API server refuses rules whose cost
it cannot bound, so every list and text that a rule reads has a maximum length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drover import spec
from drover.sources import FORMS
from drover_operator.crd_status import STATUS

Schema = dict[str, Any]

GROUP, _, VERSION = spec.API_VERSION.partition("/")
PLURAL = "inferenceclusters"
LONGEST_NAME = 50
"""Of a cluster and a group together; a StatefulSet's pods have labels that add 11 more, and 63 is the limit."""

_SAME_SIZE = "(has({0}) == has({1}) && (!has({0}) || {0} == {1}))"
_KEPT = " && ".join(
    [
        "self.cache.enabled == oldSelf.cache.enabled",
        "self.cache.accessMode == oldSelf.cache.accessMode",
        _SAME_SIZE.format("self.cache.size", "oldSelf.cache.size"),
        _SAME_SIZE.format("self.cache.storageClassName", "oldSelf.cache.storageClassName"),
    ]
)
_DEVICES = "self.workers.map(w, w.replicas * w.devicesPerWorker).sum()"
_SHARES = "self.split.proportions"
_ENVS = ("spec.model.env", "spec.workers[].env")


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule at a place of the resource, "[]" being the items of a list; `words` for who broke it."""

    place: str
    rule: str
    words: str
    field: str = ""


def _form(scheme: str) -> Rule:
    """The source of a scheme looks as `drover.sources` says."""
    pattern, words = FORMS[scheme]
    rule = f"!self.source.startsWith('{scheme}://') || self.source.matches(r'^{pattern.pattern}$')"
    return Rule("spec.model", rule, f"a source with {scheme}:// must look like {words}", ".source")


RULES = (
    Rule(
        "",
        "self.metadata.name.matches(r'^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "the name must be lower-case letters, digits and '-', beginning with a letter: Services are named after it",
        ".metadata.name",
    ),
    Rule(
        "",
        f"self.spec.workers.all(w, size(self.metadata.name) + size(w.name) <= {LONGEST_NAME})",
        f"the names of the cluster and of each group may have {LONGEST_NAME} characters together: pods are named after "
        "both",
    ),
    Rule(
        "spec",
        "self.workers.all(w, self.workers.exists_one(o, o.name == w.name))",
        "two groups of workers have the same name",
        ".workers",
    ),
    Rule(
        "spec",
        f"!has({_SHARES}) || size({_SHARES}) == {_DEVICES}",
        "give one proportion for every device, in the order of the groups: replicas times devicesPerWorker of each",
        ".split.proportions",
    ),
    Rule(
        "spec.split",
        "!has(self.proportions) || self.proportions.exists(p, p > 0.0)",
        "at least one proportion must be above 0",
        ".proportions",
    ),
    Rule(
        "spec.model",
        " || ".join(f"self.source.startsWith('{scheme}://')" for scheme in FORMS),
        "source must be one of " + ", ".join(words for _, words in FORMS.values()) + "; a path is for `drover up` only",
        ".source",
    ),
    *(_form(scheme) for scheme in FORMS),
    Rule(
        "spec.model",
        "self.source.startsWith('pvc://') || has(self.storage.size)",
        "a model that is downloaded needs room: give storage.size, somewhat more than the file has",
        ".storage",
    ),
    Rule(
        "spec.model.storage",
        "self.accessMode == oldSelf.accessMode && "
        + _SAME_SIZE.format("self.storageClassName", "oldSelf.storageClassName"),
        "the class and the access mode of a volume cannot change; make another InferenceCluster",
    ),
    Rule(
        "spec.workers[]",
        "self.devicesPerWorker == 1 || self.device == 'cuda'",
        "only a cuda worker can have more than one device",
        ".devicesPerWorker",
    ),
    Rule(
        "spec.workers[]",
        "!self.cache.enabled || has(self.cache.size)",
        "a cache needs room: give cache.size, the worker's part of the model and some more",
        ".cache",
    ),
    Rule(
        "spec.workers[]",
        _KEPT,
        "the cache of a group cannot change while it exists; add a group with another name and remove this one",
        ".cache",
    ),
    *(
        Rule(f"{place}[]", "!(has(self.value) && has(self.valueFrom))", "give value or valueFrom, not both")
        for place in _ENVS
    ),
    Rule(
        "spec.serving",
        "!has(self.apiKey)",
        "a key does not belong into this resource, where many can read it; put it into a Secret and name that in "
        "apiKeySecretRef",
        ".apiKey",
    ),
    Rule("spec.serving", "self.port > 0", "port 0 is for `drover up` only", ".port"),
    Rule(
        "spec.serving",
        "!has(self.nodePort) || self.type != 'ClusterIP'",
        "nodePort needs type NodePort or LoadBalancer",
        ".nodePort",
    ),
)

LIST_KEYS = {place: ["name"] for place in ("spec.workers", "spec.imagePullSecrets", *_ENVS)}
"""Lists whose items are matched by a key when they are merged, and compared with what they were."""

COLUMNS = [
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Workers", "type": "string", "jsonPath": ".status.workers"},
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.source"},
    {"name": "Tokens/s", "type": "number", "jsonPath": ".status.report.tokensPerSecond"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "priority": 1, "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Message", "type": "string", "priority": 1, "jsonPath": '.status.conditions[?(@.type=="Ready")].message'},
]


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    names = {
        "kind": spec.KIND,
        "listKind": f"{spec.KIND}List",
        "plural": PLURAL,
        "singular": spec.KIND.lower(),
        "shortNames": ["ic"],
        "categories": ["drover"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": COLUMNS,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def schema() -> Schema:
    """The structural schema of the resource."""
    model = spec.Spec.model_json_schema(by_alias=True)
    root: Schema = {
        "type": "object",
        "description": _one_line(spec.InferenceCluster.__doc__ or ""),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": LONGEST_NAME}}},
            "spec": _structural(model, model.get("$defs", {})),
            "status": STATUS,
        },
    }
    for place, keys in LIST_KEYS.items():
        _at(root, place).update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys})
    for rule in RULES:
        _at(root, rule.place).setdefault("x-kubernetes-validations", []).append(_validation(rule))
    return root


def _structural(given: Schema, models: Mapping[str, Schema]) -> Schema:
    """A JSON schema of pydantic's as Kubernetes takes it: no references, no null, no titles, unknown parts marked."""
    if "$ref" in given:
        given = {**models[given["$ref"].rpartition("/")[2]], **{k: v for k, v in given.items() if k != "$ref"}}
    if "anyOf" in given:
        (only,) = (option for option in given["anyOf"] if option.get("type") != "null")
        beside = {key: value for key, value in given.items() if key != "anyOf"}
        return _structural({**only, **{k: v for k, v in beside.items() if k != "default" or v is not None}}, models)
    made = {key: given[key] for key in _COPIED if key in given}
    if "description" in given:
        made["description"] = _one_line(given["description"])
    if given.get("type") == ["integer", "string"]:
        made["x-kubernetes-int-or-string"] = True
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    else:
        made["type"] = given["type"]
    if "items" in given:
        made["items"] = _structural(given["items"], models)
    if given["type"] == "object":
        made.update(_fields(given, models))
    if given.get("default") is not None:
        made["default"] = _written_out(given["default"])
    return made


_COPIED = ("enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")


def _fields(given: Schema, models: Mapping[str, Schema]) -> Schema:
    """What an object holds: named fields, values of one kind under any name, or anything."""
    if "properties" in given:
        fields = {name: _structural(field, models) for name, field in given["properties"].items()}
        return {"properties": fields, **({"required": given["required"]} if given.get("required") else {})}
    values = given.get("additionalProperties", True)
    if values is True:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {"additionalProperties": _structural(values, models)}


def _written_out(default: Any) -> Any:
    """A default with all that is in it: the API server tries the rules on it before it fills in anything."""
    if not isinstance(default, dict):
        return default
    return {name: _written_out(value) for name, value in default.items() if value is not None}


def _at(root: Schema, place: str) -> Schema:
    """The part of the schema at a place like spec.workers[].cache."""
    here = root
    for step in filter(None, place.split(".")):
        here = here["properties"][step.removesuffix("[]")]
        here = here["items"] if step.endswith("[]") else here
    return here


def _validation(rule: Rule) -> Schema:
    return {"rule": rule.rule, "message": rule.words, **({"fieldPath": rule.field} if rule.field else {})}


def _one_line(text: str) -> str:
    return " ".join(text.split())
