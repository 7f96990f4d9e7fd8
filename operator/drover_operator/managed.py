"""Whether an object still is as we last applied it, read from its managed fields. Pure.

The API server writes down who owns each field. A hand that changes one of ours takes it over, one that removes it
removes it from our set too; so an object is as we left it when its hash is that of the manifest and all that the
manifest says is still ours. That needs no comparison of values, which the API server may write in other words
("0.5" as "500m"), and takes no notice of what others add.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from drover_operator import names
from drover_operator.target import Manifest

Fields = Mapping[str, Any]


class Difference(Enum):
    """What a live object lacks."""

    NONE = "as it was applied"
    MISSING = "not there"
    OUTDATED = "applied from another manifest"
    EDITED = "changed by someone else"


def difference(desired: Manifest, live: Manifest | None) -> Difference:
    """What the live object lacks of the desired one."""
    if live is None:
        return Difference.MISSING
    applied = (live["metadata"].get("annotations") or {}).get(names.APPLIED)
    if applied != desired["metadata"]["annotations"][names.APPLIED]:
        return Difference.OUTDATED
    ours = _ours(live)
    if ours is None:
        return Difference.OUTDATED
    said = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind")}
    said["metadata"] = {key: value for key, value in desired["metadata"].items() if key not in ("name", "namespace")}
    return Difference.NONE if _holds(ours, said) else Difference.EDITED


def _ours(live: Manifest) -> Fields | None:
    """The fields that we applied."""
    for entry in live["metadata"].get("managedFields") or ():
        applied = entry.get("operation") == "Apply" and not entry.get("subresource")
        if entry.get("manager") == names.MANAGER and applied:
            fields: Fields = entry.get("fieldsV1") or {}
            return fields
    return None


def _holds(fields: Fields, value: Any) -> bool:
    """Whether every field of a value is in a set; a field without parts in the set is owned whole."""
    if not (fields.keys() - {"."}):
        return True
    if isinstance(value, dict):
        return all(f"f:{key}" in fields and _holds(fields[f"f:{key}"], part) for key, part in value.items())
    if isinstance(value, list):
        return all(_holds_item(fields, item) for item in value)
    return True


def _holds_item(fields: Fields, item: Any) -> bool:
    """Whether an item of a list is in a set: under its keys, or as the value it is."""
    for name, parts in fields.items():
        kind, _, text = name.partition(":")
        if kind == "k" and isinstance(item, dict):
            keys = json.loads(text)
            if all(item.get(key) == wanted for key, wanted in keys.items()):
                return _holds(parts, item)
        if kind == "v" and json.loads(text) == item:
            return True
    return False
