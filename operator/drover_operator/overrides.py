"""A user's changes merged over a pod template, as a strategic merge patch would be. Pure.

Mappings merge; lists of containers, volumes and the like merge by the key that names their items; other lists and
plain values are replaced. A null removes what it stands for.
"""

from collections.abc import Sequence
from typing import Any

from drover_operator.target import Manifest

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}


def merged(base: Manifest, changes: Manifest) -> Manifest:
    """`base` with the changes made; neither is altered."""
    made = dict(base)
    for key, change in changes.items():
        if change is None:
            made.pop(key, None)
        elif isinstance(change, dict):
            made[key] = merged(base[key] if isinstance(base.get(key), dict) else {}, change)
        elif isinstance(change, list) and key in _KEYS:
            made[key] = _merged_items(base.get(key) or [], change, _KEYS[key])
        else:
            made[key] = change
    return made


def _merged_items(base: Sequence[Any], changes: Sequence[Any], key: str) -> list[Any]:
    """Items by name: those of `base` in their order, changed where named, then the new ones."""
    named = {change[key]: change for change in changes if isinstance(change, dict) and key in change}
    kept = [merged(item, named.pop(item[key])) if item.get(key) in named else item for item in base]
    return [*kept, *(merged({}, change) for change in named.values())]
