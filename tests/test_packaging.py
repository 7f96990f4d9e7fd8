import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import drover

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(root: Path, target: str, folder: Path) -> Path:
    """Build with the pinned back end; nothing is fetched."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(ROOT, "wheel", tmp_path_factory.mktemp("wheel")))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {
        "drover",
        "drover_operator",
        f"drover-{drover.__version__}.dist-info",
    }
    for needed in ("drover/cli.py", "drover/py.typed", "drover_operator/__init__.py", "drover_operator/py.typed"):
        assert needed in names
    assert not [name for name in names if name.endswith((".nbi", ".nbc", ".pyc"))]


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"drover-{drover.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"Version: {drover.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "# Drover" in metadata
    assert wheel.read(f"{info}/entry_points.txt").decode() == "[console_scripts]\ndrover = drover.cli:main\n"
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_a_checkout_without_the_operator_builds_the_data_plane(tmp_path: Path) -> None:
    """What Dockerfile.worker copies is enough."""
    context = tmp_path / "context"
    context.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    shutil.copytree(ROOT / "worker", context / "worker", ignore=shutil.ignore_patterns("__pycache__"))
    names = zipfile.ZipFile(build(context, "wheel", tmp_path / "dist")).namelist()
    assert "drover/cli.py" in names
    assert not [name for name in names if name.startswith("drover_operator")]


def test_the_source_archive_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, "sdist", tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("Makefile", "requirements.lock", "pyproject.toml", "tests/test_packaging.py", "manifests/samples"):
        assert any(name == needed or name.startswith(f"{needed}/") for name in names), needed


def test_the_lock_pins_what_every_extra_but_cuda_needs() -> None:
    pinned = set(re.findall(r"^([a-z0-9][\w.-]*)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(name for extra in extras if extra != "cuda" for name in extras[extra])]
    names = {re.split(r"[<>=~!]", requirement)[0].lower().replace("_", "-") for requirement in needed}
    assert names <= pinned
    assert "hatchling" in names, "make install builds without isolation"


def test_the_back_end_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (required,) = project["build-system"]["requires"]
    assert required in project["project"]["optional-dependencies"]["build"]
    assert f"\n{required} \\\n" in (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("path", ["Dockerfile.operator", "Dockerfile.worker"])
def test_what_an_image_copies_is_in_its_context(path: str) -> None:
    """.dockerignore leaves everything out but what it names."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / path).read_text(), re.MULTILINE)
    copied = {name for line in copies for name in line.split()}
    assert copied <= allowed
    assert all((ROOT / name).exists() for name in copied)
