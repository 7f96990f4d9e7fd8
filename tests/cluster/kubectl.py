"""kubectl, thinly: questions and orders to one namespace of a cluster, objects as plain dictionaries."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
T = TypeVar("T")
INFERENCE = "inferenceclusters.drover.dev"


class KubectlError(AssertionError):
    """What kubectl said when it failed."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """A cluster, and the namespace that is meant when none is named."""

    program: Path
    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> "Kubectl":
        """The same for another namespace."""
        return replace(self, namespace=namespace)

    def __call__(self, *args: str, stdin: str | bytes | None = None, timeout: float = 120) -> str:
        """Run it and return what it printed; raises KubectlError with what it said if it failed."""
        sent = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            self.command(*args), input=sent or b"", capture_output=True, timeout=timeout, check=False, env=self.env
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode(errors="replace")

    @property
    def env(self) -> Mapping[str, str]:
        """The environment for programs that speak to the same cluster (helm)."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def command(self, *args: str) -> list[str]:
        """The command line."""
        return [str(self.program), f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *args]

    def apply(self, *objects: Object) -> None:
        """Server-side apply, as the test's own field manager."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self("apply", "--server-side", "--field-manager=drover-tests", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        found: Object = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """One object, or None."""
        text = self("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text else None

    def items(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind that have these labels."""
        found: list[Object] = json.loads(self("get", kind, f"--selector={selector}", "-o", "json"))["items"]
        return found

    def wait(self, what: str, condition: str, seconds: float = 120) -> None:
        """Wait for a condition (`condition=Ready`, `delete`, `jsonpath={…}=…`) of `kind/name`."""
        self("wait", f"--for={condition}", what, f"--timeout={seconds:.0f}s", timeout=seconds + 30)

    def rolled_out(self, what: str, seconds: float = 120) -> None:
        """Wait until all pods of a Deployment or StatefulSet are there and Ready."""
        self("rollout", "status", what, f"--timeout={seconds:.0f}s", timeout=seconds + 30)

    def delete(self, kind: str, *names: str, wait: bool = True) -> None:
        """Delete objects; those that are not there are no error."""
        self("delete", kind, *names, "--ignore-not-found", f"--wait={str(wait).lower()}")

    def logs(self, pod: str, *options: str) -> str:
        """What a pod has printed."""
        return self("logs", pod, *options)

    def execute(self, pod: str, *argv: str, stdin: bytes | None = None, timeout: float = 120) -> str:
        """Run a program in a pod (the first container, or `-c` before the pod's name)."""
        options = ("-i",) if stdin is not None else ()
        return self("exec", *options, pod, "--", *argv, stdin=stdin, timeout=timeout)

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """A port of `svc/NAME` or `pod/NAME`, as the URL of a port of this machine."""
        argv = self.command("port-forward", target, f":{port}")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout
                said = process.stdout.readline()
                found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", said)
                if not found:
                    raise KubectlError(f"port-forward {target}: {said.strip()}")
                yield f"http://127.0.0.1:{found[1]}"
            finally:
                process.kill()

    def describe(self) -> str:
        """All that a person would look at first when a test fails."""
        parts = [
            self("get", "all,pvc,configmap", "-o", "wide"),
            self("get", "inferenceclusters", "-o", "yaml")
            if self("get", "crd", INFERENCE, "--ignore-not-found")
            else "",
            self("get", "events", "--sort-by=.lastTimestamp"),
        ]
        for pod in self.items("pods"):
            name = pod["metadata"]["name"]
            for container in pod["spec"]["containers"]:
                try:
                    said = self.logs(name, "-c", container["name"], "--tail=25")
                except KubectlError as error:
                    said = str(error)
                parts.append(f"--- {name} {container['name']}\n{said}")
        return "\n".join(parts)


def until(what: str, ask: Callable[[], T | None], seconds: float = 120, why: Callable[[], object] | None = None) -> T:
    """Ask until the answer is something, and return it; what kubectl refuses meanwhile is no answer.

    `why` says more when the time is up.
    """
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            if last := ask():
                return last
        except KubectlError as error:
            last = error
        time.sleep(0.25)
    raise AssertionError(f"waited {seconds:.0f} s until {what}; last answer: {why() if why else last}")
