"""What `helm test` runs in the operator's image.

Its arguments are the address of the operator's health, then the namespaces to read InferenceClusters in; none for all.
"""

import sys
import time
import urllib.error
import urllib.request

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

CLUSTERS = ("drover.dev", "v1alpha1")
PLURAL = "inferenceclusters"
SECONDS = 60.0


def healthy(url: str, deadline: float) -> str:
    """What is wrong with the operator; "" for nothing."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return ""
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                return f"the operator does not answer at {url}: {error}; see its log"
        time.sleep(1)


def served(namespaces: list[str]) -> str:
    """What is wrong with the CRD, or with reading it; "" for nothing."""
    config.load_config()
    api = client.CustomObjectsApi()
    try:
        if not namespaces:
            api.list_cluster_custom_object(*CLUSTERS, PLURAL, limit=1)
        for namespace in namespaces:
            api.list_namespaced_custom_object(*CLUSTERS, namespace, PLURAL, limit=1)
    except ApiException as error:
        advice = {403: "see the chart's value rbac", 404: "see the chart's value crds"}.get(error.status, "try again")
        return f"InferenceClusters cannot be read: {error.status} {error.reason}; {advice}"
    return ""


def main(url: str, *namespaces: str) -> int:
    """Check both; the exit status is the number of faults."""
    faults = [fault for fault in (healthy(url, time.monotonic() + SECONDS), served(list(namespaces))) if fault]
    print("\n".join(faults) or "InferenceClusters are served, and the operator is healthy")
    return len(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
