"""Reports: their keys, their size, and the reason and exit status of every kind of error."""

import json
from pathlib import Path

import pytest

from drover import errors, reports
from drover.errors import DroverError, FetchError
from drover.reports import FetchReport, HeaderReport, LoadReport, ModelFacts, StageReport

STAGE = StageReport("worker-0.worker.default:50052", 0, "0-15 + output", 10**10, 10**11, 9 * 10**10, 10**9, 10**6)


def test_the_schema_of_a_load_report() -> None:
    report = LoadReport(
        True, "Verified", "fine", ModelFacts("llama", 6, 100), (STAGE,), 1, 2, 0.5, 10.0, 5.0, None, "a"
    )
    assert json.loads(reports.encode(report)) == {
        "ok": True,
        "reason": "Verified",
        "message": "fine",
        "model": {"architecture": "llama", "layers": 6, "bytes": 100},
        "fingerprint": None,
        "stages": [
            {
                "worker": "worker-0.worker.default:50052",
                "device": 0,
                "layers": "0-15 + output",
                "bytes": 10**10,
                "memoryBefore": 10**11,
                "memoryAfter": 9 * 10**10,
                "wireSent": 10**9,
                "wireReceived": 10**6,
            }
        ],
        "bytesUploaded": 1,
        "bytesCached": 2,
        "loadSeconds": 0.5,
        "promptTokensPerSecond": 10.0,
        "tokensPerSecond": 5.0,
        "predictedTokensPerSecond": None,
        "text": "a",
    }


def test_the_schema_of_a_fetch_report() -> None:
    assert json.loads(reports.encode(FetchReport(False, "NotFound", "no"))) == {
        "ok": False,
        "reason": "NotFound",
        "message": "no",
        "path": None,
        "bytes": None,
        "sha256": None,
        "architecture": None,
        "layers": None,
    }


def test_the_schema_of_a_header_report() -> None:
    report = HeaderReport(True, "HeaderRead", "fine", 100, "ab", "llama", 6, ((10, 6), (7, 1)), 5)
    assert json.loads(reports.encode(report)) == {
        "ok": True,
        "reason": "HeaderRead",
        "message": "fine",
        "bytes": 100,
        "sha256": "ab",
        "architecture": "llama",
        "layers": 6,
        "units": [[10, 6], [7, 1]],
        "reserve": 5,
    }


@pytest.mark.parametrize(("count", "kept"), [(131, True), (400, False)])
def test_the_units_of_a_model_are_reported_all_or_none(count: int, kept: bool) -> None:
    """Of 130 layers no two are alike here, and the text is long."""
    units = tuple((10**10 + number, 1) for number in range(count))
    line = reports.encode(HeaderReport(True, "HeaderRead", "é" * 2000, 10**12, "a" * 64, "llama", count, units, 10**10))
    assert len(line.encode()) <= reports.MAX_BYTES
    found = json.loads(line)["units"]
    assert found == ([list(run) for run in units] if kept else None)


@pytest.mark.parametrize(
    ("stages", "words", "left_out"), [(1, 10, False), (1, 9000, False), (200, 9000, True), (200, 0, True)]
)
def test_a_report_is_never_larger_than_kubernetes_takes(stages: int, words: int, left_out: bool) -> None:
    report = LoadReport(False, "SplitMismatch", "é" * words, stages=(STAGE,) * stages, text="ü" * words)
    line = reports.encode(report)
    assert len(line.encode()) <= reports.MAX_BYTES
    data = json.loads(line)
    assert len(data["stages"]) + data.get("stagesLeftOut", 0) == stages
    assert ("stagesLeftOut" in data) is left_out
    assert len(data["message"]) >= min(words, 160)


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        (errors.WorkerError("x"), "WorkerUnavailable", 3),
        (errors.IncompatibleWorkerError("x"), "IncompatibleWorker", 1),
        (errors.DeviceError("x"), "OutOfMemory", 1),
        (errors.ModelError("x"), "ModelUnreadable", 1),
        (errors.ArchitectureError("x", "mammoth"), "UnsupportedArchitecture", 1),
        (errors.ChecksumError("x"), "ChecksumMismatch", 1),
        (errors.ModelChangedError("x"), "ModelChanged", 3),
        (errors.ModelReplacedError("x"), "ModelReplaced", 4),
        (errors.ShortageError("x"), "DoesNotFit", 1),
        (errors.PlanError("x"), "InvalidSplit", 1),
        (errors.RequestError("x"), "InvalidSettings", 1),
        (errors.ResultError("x"), "WrongResults", 1),
        (FetchError("x", "NotFound"), "NotFound", 1),
        (FetchError("x", "SourceUnavailable", transient=True), "SourceUnavailable", 3),
        (DroverError("x"), "Failed", 1),
    ],
)
def test_reasons(error: DroverError, reason: str, status: int) -> None:
    assert reports.reason_of(error) == (reason, status)


def test_where_a_report_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = FetchReport(True, "Fetched", "fine")
    reports.write(report, tmp_path / "log")
    reports.write(report, None)
    assert (tmp_path / "log").read_text() + "\n" == capsys.readouterr().out
    with pytest.raises(DroverError, match="the report cannot be written to /nowhere/log: No such file"):
        reports.write(report, Path("/nowhere/log"))
