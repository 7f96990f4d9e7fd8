"""What makes a machine a node: containerd, the kubelet, service addresses, names."""

from pathlib import Path

from cluster import archive, cgroups, state
from cluster.cache import digest, kept
from cluster.control_plane import answers
from cluster.programs import pause, run
from cluster.state import NODE, PODS, launch, start, until, write

PAUSE = "localhost/pause:1"
NETWORK = "drover-pods"
CONTAINERD = """
version = 2
root = "{where}/containerd/root"
state = "{where}/containerd/state"
[grpc]
  address = "{where}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{where}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{where}/runc"
"""
NAMES = """
.:53 {{
  bind {node}
  errors
  kubernetes cluster.local {{
    kubeconfig {where}/dns.kubeconfig
    ttl 5
  }}
}}
"""


def begin() -> None:
    """Start them in the order they need each other, and wait until the node is Ready."""
    where = state.place()
    write("cni/10-pods.conflist", {"cniVersion": "0.4.0", "name": NETWORK, "plugins": _pod_network(where)})
    write("containerd.toml", CONTAINERD.format(where=where, pause=PAUSE))
    launch("containerd", "containerd", "--config", f"{where}/containerd.toml")
    until("containerd answers", lambda: _ctr_answers(where))  # the kubelet gives up on one that is not there
    load(_pause_image())
    write("kubelet.yaml", _kubelet(where))
    start(
        "kubelet",
        f"--kubeconfig={where}/node.kubeconfig",
        "--hostname-override=node",
        f"--node-ip={NODE}",
        f"--root-dir={where}/kubelet",
        f"--config={where}/kubelet.yaml",
    )
    write("proxy.yaml", _proxy(where))
    start("proxy", f"--config={where}/proxy.yaml")
    write("Corefile", NAMES.format(node=NODE, where=where))
    start("dns", "-conf", f"{where}/Corefile")
    until("the node is Ready", lambda: answers("wait", "--for=condition=Ready", "node/node", "--timeout=1s"))


def load(archive_file: Path) -> None:
    """Import an image (docker-archive) into the node."""
    _images("import", archive_file)


def tag(image: str, also: str) -> None:
    """Give an image of the node another name too."""
    _images("tag", "--force", image, also)


def _images(verb: str, *args: str | Path) -> None:
    run("ctr", "-a", state.place() / "containerd.sock", "-n", "k8s.io", "images", verb, *args)


def _ctr_answers(where: Path) -> bool:
    from cluster.cache import ClusterUnavailableError

    try:
        run("ctr", "-a", where / "containerd.sock", "--connect-timeout", "1s", "version")
    except ClusterUnavailableError:
        return False
    return True


def _pause_image() -> Path:
    program = pause()

    def write_image(target: Path) -> None:
        layer, named = target.with_name("layer.tar"), target.with_name("pause")
        named.write_bytes(program.read_bytes())
        archive.layer_of(layer, named)
        archive.write(target, PAUSE, layer, {"Entrypoint": ["/pause"], "User": "65535:65535"})

    return kept("pause-image", digest(program.name), ".tar", write_image)


def _pod_network(where: Path) -> list[dict[str, object]]:
    """ptp, not bridge: no packet between pods skips the service rules."""
    addresses = {
        "type": "host-local",
        "dataDir": f"{where}/addresses",
        "ranges": [[{"subnet": PODS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return [
        {"type": "ptp", "mtu": 1500, "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]


def _kubelet(where: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups.NAME}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDNS": [NODE],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "containerRuntimeEndpoint": f"unix://{where}/containerd.sock",
        "podLogsDir": f"{where}/logs",
        "volumePluginDir": f"{where}/volume-plugins",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},  # a test's disk may be nearly full and still do
        "nodeStatusUpdateFrequency": "2s",
        "maxPods": 200,
        "serializeImagePulls": False,
    }


def _proxy(where: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{where}/proxy.kubeconfig"},
        "clusterCIDR": PODS,
        "hostnameOverride": "node",
        "bindAddress": NODE,
        "conntrack": {"maxPerCore": 0},
    }
