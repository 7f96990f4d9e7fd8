"""The chart as helm renders it, and the manifests that are made of it.

    PYTHONPATH=tests python -m support.chart helm         have helm (built once, outside the checkout)
    PYTHONPATH=tests python -m support.chart manifests    write them

manifests/operator.yaml says in its head what it was made of, so that a stale one is found without helm too.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster import programs
from cluster.cache import ClusterUnavailableError, digest
from drover_operator.__main__ import HEAD
from drover_operator.crd import definition

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/drover"
CRD, CHART_CRD = ROOT / "manifests/crd.yaml", CHART / "files/crd.yaml"
OPERATOR = ROOT / "manifests/operator.yaml"
NAMESPACE = "drover-system"
HELMS_OWN = re.compile(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^# Source: .*\n", re.MULTILINE)
"""What only means something to helm."""
OPERATOR_HEAD = """\
# Written by `make manifests` from charts/drover; not to be edited. The CRD is apart, in crd.yaml.
# Of the chart {digest}, by helm {helm}.
apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""

Object = dict[str, Any]


class HelmError(Exception):
    """Helm refused; its words are the message."""


def crd_text() -> str:
    """What manifests/crd.yaml and its copy in the chart ought to be."""
    return HEAD + yaml.safe_dump(definition(), sort_keys=False, width=120)


def operator_head() -> str:
    """The first lines of manifests/operator.yaml: they name the chart by its content."""
    return OPERATOR_HEAD.format(digest=digest(CHART), helm=programs.HELM, namespace=NAMESPACE)


def operator_text() -> str:
    """What manifests/operator.yaml ought to be."""
    text = template({"crds": {"install": False}}, "--no-hooks")
    return operator_head() + HELMS_OWN.sub("", text)


def rendered(values: Mapping[str, Any] | None = None, *, release: str = "drover", chart: Path = CHART) -> list[Object]:
    """Every object of the chart, for the caller to keep."""
    return list(json.loads(_rendered(json.dumps(values or {}), release, chart)))


@cache
def _rendered(values: str, release: str, chart: Path) -> str:
    text = template(json.loads(values), release=release, chart=chart)
    return json.dumps([made for made in yaml.load_all(text, Loader=yaml.CSafeLoader) if made])


def template(values: Mapping[str, Any] | None = None, *more: str, release: str = "drover", chart: Path = CHART) -> str:
    """What `helm template` prints."""
    version = ["--kube-version", programs.KUBERNETES]  # one built without its linker flags takes itself for 1.20
    return _helm(values, "template", release, str(chart), "--namespace", NAMESPACE, *version, *more)


def lint(values: Mapping[str, Any] | None = None) -> str:
    """What `helm lint --strict` prints."""
    return _helm(values, "lint", "--strict", str(CHART))


def _helm(values: Mapping[str, Any] | None, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values or {}), file)
        command = [str(programs.helm()), *arguments, "--values", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """`helm` or `manifests`; returns the exit status."""
    try:
        if arguments == ["helm"]:
            print(programs.helm())
        elif arguments == ["manifests"]:
            for path in (CRD, CHART_CRD):
                path.write_text(crd_text())
            OPERATOR.write_text(operator_text())
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except (ClusterUnavailableError, HelmError) as error:
        print(f"chart: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
