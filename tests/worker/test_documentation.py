"""docs/worker.md names every option, endpoint, metric and reason there is, and none that is not."""

import re
from pathlib import Path

import pytest
import typer

from drover.worker import status_server
from drover.worker.__main__ import add_to
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.server import Server
from drover.worker.status import Status
from drover.worker.tally import REASONS, Tally

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "worker.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of a table, by the first word of its head."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def options() -> dict[str, object]:
    """Default by the option's spellings."""
    app = typer.Typer()
    add_to(app)
    parameters = typer.main.get_command(app).params
    return {" ".join(sorted(parameter.opts)): parameter.default for parameter in parameters}


def test_options() -> None:
    documented = {" ".join(sorted(words(row[0]))) for row in rows("option")}
    assert documented == set(options()) - {"--install-completion", "--show-completion"}


def test_defaults() -> None:
    said = {" ".join(sorted(words(row[0]))): row[1] for row in rows("option")}
    for spellings, default in options().items():
        if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
            assert said[spellings] == (f"{default:g}" if isinstance(default, float) else str(default))


def test_metrics_and_their_labels() -> None:
    status = Status(Tally())
    devices = [SharedDevice(ReferenceDevice(1))]
    server = Server(devices)
    status.opened(devices, server, None)
    found = {
        f"{figure.name}{'_total' if figure.kind == 'counter' else ''}": list(figure.labels)
        for figure in status.figures()
    }
    server.close()
    assert {words(row[0])[0]: words(row[1]) for row in rows("metric")} == found


def test_reasons() -> None:
    assert [words(row[0])[0] for row in rows("reason")] == list(REASONS)


def test_endpoints() -> None:
    source = Path(status_server.__file__).read_text()
    assert [words(row[0])[0] for row in rows("path")] == re.findall(r'^ {8}"(/\w+)": lambda', source, re.MULTILINE)


@pytest.mark.parametrize("folder", ["", "devices"])
def test_environment(folder: str) -> None:
    """What the worker reads of it by name; the cache's homes are read in one function each."""
    documented = {name for row in rows("variable") for name in words(row[0])}
    read: set[str] = set()
    for path in (ROOT / "worker/drover/worker" / folder).glob("*.py"):
        text = path.read_text()
        found = re.findall(r'environ(?:\.get\(|\[)"(\w+)"|"(\w+)" in os\.environ', text)
        read |= {first or second for first, second in found}
    assert read <= documented
