"""The node's network: a namespace of its own and one link to this machine, which routes to pods and services over it.

So programs of this machine reach the API server, pods and services as they are; nothing leads further out.
"""

import json
import subprocess
from ipaddress import ip_network
from pathlib import Path

from cluster.cache import ClusterUnavailableError
from cluster.programs import run
from cluster.state import EVERYTHING, HOST, LINK_BITS, NETNS, NODE, inside

LINK = "drover-kube"


def make() -> None:
    """Make namespace, link and route; refuse where the addresses already mean something."""
    ours = ip_network(EVERYTHING)
    for route in json.loads(run("ip", "-json", "route", "show")):
        if "gateway" not in route and route["dst"] != "default" and ours.overlaps(ip_network(route["dst"])):
            raise ClusterUnavailableError(
                f"{route['dst']} is a network of this machine ({route['dev']}): no room for {ours}"
            )
    run("ip", "netns", "add", NETNS)
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "node0", "netns", NETNS)
    run("ip", "addr", "add", f"{HOST}/{LINK_BITS}", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    run("ip", "route", "add", EVERYTHING, "via", NODE)
    for line in ("link set lo up", f"addr add {NODE}/{LINK_BITS} dev node0", "link set node0 up"):
        run("ip", "-n", NETNS, *line.split())
    run("ip", "-n", NETNS, "route", "add", "default", "dev", "node0")  # leads nowhere, at once
    run(*inside("sysctl", "-qw", "net.ipv4.ip_forward=1"))


def remove() -> None:
    """Remove all of it; it may not be there, or only in part."""
    subprocess.run(["ip", "link", "del", LINK], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", NETNS], capture_output=True, check=False)


def processes() -> set[int]:
    """Everything that runs in the namespace itself; pods have namespaces of their own."""
    if not Path(f"/run/netns/{NETNS}").exists():
        return set()
    listed = subprocess.run(["ip", "netns", "pids", NETNS], capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in listed.split()}
