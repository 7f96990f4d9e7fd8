"""etcd, the API server, the controllers and the scheduler: identities first, then processes.

The API server is of use alone: what is written to it stays as it is, since nobody acts on it.
"""

import secrets
import subprocess

from cluster import state
from cluster.programs import kubectl, run
from cluster.state import NODE, SERVICES, start, until, write

ETCD = "http://127.0.0.1:2379"
API = f"https://{NODE}:6443"
IDENTITIES = {  # kubeconfig -> user, group
    "admin": ("admin", "system:masters"),
    "node": ("system:node:node", "system:nodes"),
    "manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "dns": ("dns", "system:masters"),
}


def identities() -> None:
    """A token and a kubeconfig for everybody, and the key that signs service accounts."""
    run("openssl", "genrsa", "-out", state.place() / "accounts.key", "2048")
    rows = []
    for name, (user, group) in IDENTITIES.items():
        token = secrets.token_hex(16)
        rows.append(f'{token},{user},{name},"{group}"\n')
        cluster = {"server": API, "certificate-authority": f"{state.place()}/apiserver.crt"}
        write(
            f"{name}.kubeconfig",
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "drover",
                "clusters": [{"name": "drover", "cluster": cluster}],
                "users": [{"name": "drover", "user": {"token": token}}],
                "contexts": [{"name": "drover", "context": {"cluster": "drover", "user": "drover"}}],
            },
        )
    write("tokens.csv", "".join(rows))


def serve() -> None:
    """Start the API server on an etcd of its own and wait until it is ready."""
    where = state.place()
    start(
        "etcd",
        f"--data-dir={where}/etcd",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    )
    start(
        "apiserver",
        f"--etcd-servers={ETCD}",
        f"--advertise-address={NODE}",
        "--secure-port=6443",
        f"--cert-dir={where}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        f"--token-auth-file={where}/tokens.csv",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={where}/accounts.key",
        f"--service-account-signing-key-file={where}/accounts.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    )
    until("the API server is ready", lambda: answers("get", "--raw=/readyz"))


def act() -> None:
    """Start those who act on what is written: the controllers and the scheduler."""
    where = state.place()
    start(
        "controller-manager",
        f"--kubeconfig={where}/manager.kubeconfig",
        "--leader-elect=false",
        f"--service-account-private-key-file={where}/accounts.key",
        f"--root-ca-file={where}/apiserver.crt",
        "--use-service-account-credentials=true",
        "--bind-address=127.0.0.1",
    )
    start(
        "scheduler",
        f"--kubeconfig={where}/scheduler.kubeconfig",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    )


def answers(*args: str) -> bool:
    """Whether this question of kubectl's succeeds."""
    argv = [str(kubectl()), f"--kubeconfig={state.place()}/admin.kubeconfig", "--request-timeout=5s", *args]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
