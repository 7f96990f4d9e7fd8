"""The rules of docs/architecture.md section 6 that a machine can hold; import-linter holds the arrows of section 3."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from drover import spec_file
from drover.rpc.messages import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
ROOTS = {"drover": ROOT / "worker", "drover_operator": ROOT / "operator"}
SOURCES = sorted(path for root in ROOTS.values() for path in root.rglob("*.py"))
KERNELS = ROOT / "worker/drover/worker/devices/cpu"

MOST_LINES = 400
MOST_FUNCTION_LINES = 50

PURE = (
    "drover/coordinator/prediction.py",
    "drover/ggml",
    "drover/rpc",
    "drover/plan.py",
    "drover/sizes.py",
    "drover/sources.py",
    "drover/spec.py",
    "drover/worker/devices/device.py",
    "drover/worker/devices/offer.py",
    "drover/worker/limits.py",
    "drover/worker/trace.py",
    *(
        f"drover_operator/{name}.py"
        for name in (
            "crd crd_status desired errors forecast layout managed names observed overrides pods progress status "
            "target troubles"
        ).split()
    ),
)
EFFECTS = {
    "asyncio",
    "logging",
    "numpy",
    "os",
    "pathlib",
    "random",
    "socket",
    "structlog",
    "subprocess",
    "threading",
    "time",
}
ASYNC = {
    "drover/coordinator/generation.py",
    "drover/coordinator/http_server.py",
    "drover/coordinator/routes.py",
    "drover_operator/handlers.py",
}
DOORS = {
    "asyncio": ASYNC,
    "cupy": {"drover/worker/devices/cuda/"},
    "fastapi": {"drover/coordinator/routes.py", "drover/coordinator/http_server.py"},
    "http": {"drover/worker/status_server.py", "drover/fetch/web.py"},
    "gguf": {"drover/worker/devices/reference/grids.py"},
    "huggingface_hub": {"drover/fetch/locate.py"},
    "jinja2": {"drover/coordinator/chat.py"},
    "kopf": {"drover_operator/handlers.py"},
    "kubernetes": {"drover_operator/cluster.py"},
    "numba": {"drover/hashing.py", "drover/worker/devices/cpu/"},
    "prometheus_client": {"drover/metrics.py", "drover_operator/metrics.py"},
    "socket": {
        "drover/worker/server.py",
        "drover/worker/status_server.py",
        "drover/coordinator/link.py",
        "drover/coordinator/http_server.py",
        "drover_operator/probe.py",
    },
    "subprocess": {"drover/herd.py", "drover/worker/kernels.py"},
    "tokenizers": {"drover/coordinator/tokenizer.py", "drover/coordinator/pretokenizers.py"},
    "uvicorn": {"drover/coordinator/http_server.py"},
    "yaml": {"drover/spec_file.py", "drover_operator/__main__.py"},
}
VAGUE = re.compile(r"(^|_)(utils?|common|helpers?|managers?|services?|misc)(_|$)")


def place(path: Path) -> str:
    """A module's path from its source root: drover/rpc/codec.py."""
    return next(str(path.relative_to(root)) for root in ROOTS.values() if path.is_relative_to(root))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level packages a file imports, anywhere in it but for types alone, with the line."""
    for_types = {
        inner
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((name.name.partition(".")[0], node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 30


def test_a_file_has_at_most_400_lines() -> None:
    long = {place(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert not {name: lines for name, lines in long.items() if not name.startswith("drover/worker/devices/cpu/")}


def test_a_function_fits_a_screen() -> None:
    """Its body, that is: the parameters of a command are a table of its flags."""
    long = [
        f"{place(path)}:{node.lineno} {node.name}: {lines} lines"
        for path in SOURCES
        if not path.is_relative_to(KERNELS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.body[0].lineno + 1) > MOST_FUNCTION_LINES
    ]
    assert not long


def test_pure_modules_import_no_effects() -> None:
    found = [
        f"{place(path)}:{line} imports {name}"
        for path in SOURCES
        if place(path).startswith(PURE)
        for name, line in imports(path)
        if name in EFFECTS
    ]
    assert not found


def test_every_third_party_with_effects_has_one_door() -> None:
    found = [
        f"{place(path)}:{line} imports {name}"
        for path in SOURCES
        for name, line in imports(path)
        if name in DOORS and not place(path).startswith(tuple(DOORS[name]))
    ]
    assert not found


def test_async_is_only_where_a_framework_asks_for_it() -> None:
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = {place(path) for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, kinds)}
    assert found <= ASYNC


def test_no_name_is_vague() -> None:
    names = [(place(path), part) for path in SOURCES for part in Path(place(path)).with_suffix("").parts]
    names += [
        (place(path), node.name)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = [
        (place(path), re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower())
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [pair for pair in names + classes if VAGUE.search(pair[1])]


def test_source_roots_are_folders_and_not_packages() -> None:
    """An operator/__init__.py would hide the standard library's `operator` on Python 3.12 and later."""
    assert not [root for root in ROOTS.values() if (root / "__init__.py").exists()]


def test_every_package_says_what_it_is() -> None:
    folders = {path.parent for path in SOURCES}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not [place(path) for path in SOURCES if not ast.get_docstring(tree(path))]


@pytest.mark.parametrize(
    ("path", "name"),
    [("drover/worker/session.py", "Session"), ("drover/coordinator/remote.py", "RemoteDevice")],
)
def test_commands_are_the_methods_of_both_ends(path: str, name: str) -> None:
    """One search finds a command at both ends: the method has its name."""
    node = next(
        node for node in tree(ROOTS["drover"] / path).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    assert sorted({command.method for command in COMMANDS.values()} - methods) == []


def test_operations_of_the_cpu_device_are_in_the_reference_device() -> None:
    from drover.worker.devices.cpu.lowering import RULES
    from drover.worker.devices.reference.device import OPERATIONS

    assert len(RULES) > 10
    assert set(RULES) <= OPERATIONS


def test_every_sample_is_valid() -> None:
    samples = sorted((ROOT / "manifests/samples").glob("*.yaml"))
    assert samples
    for path in samples:
        assert spec_file.load(path).metadata.name == path.stem


def test_no_committed_file_names_a_package_host_or_a_private_path() -> None:
    """What is fetched is named by package, version and hash; where from is each machine's own business."""
    hosts = r"files\.pythonhosted\.org|pypi\.org/simple|registry\.npmjs|proxy\.golang|deb\.debian\.org|snapshot\.debian"
    pattern = re.compile(rf"{hosts}|--(extra-)?index-url|--find-links|--trusted-host")
    allowed = {"tests/test_architecture.py", "Makefile"}
    found = [
        f"{name}:{number}"
        for name in committed()
        if name not in allowed and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(errors="ignore").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_pinned_versions_have_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    pinned = re.findall(r"^[a-z0-9][\w.-]*==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    named = re.findall(r"^[a-z0-9].*", text, re.MULTILINE | re.IGNORECASE)
    assert len(pinned) == len(named) > 50


def committed() -> list[str]:
    """Files of the repository, those about to be added included; of an unpacked archive, all."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return listed.stdout.split("\n")[:-1]
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
