"""Conditions from facts, in tables; whole stories are in test_reconcile."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from drover_operator import layout, observed, progress, status, target
from drover_operator.crd_status import STATUS
from drover_operator.desired import Stage
from drover_operator.forecast import Forecast, Header
from drover_operator.observed import Facts, Job, Worker
from drover_operator.progress import Failures, Model, Progress, Replaced
from drover_operator.troubles import Trouble
from support.operator_world import DEFAULTS, body

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GIB = 1 << 30


def cluster(**spec: Any) -> target.Target:
    return target.read(body(**spec), DEFAULTS)


def plan(wanted: target.Target) -> layout.Layout:
    places = layout.seats(wanted.spec, "herd", "farm")
    return layout.of(
        wanted.spec, places, {seat.worker: [GIB] for seat in places}, {seat.worker: "1" for seat in places}
    )


UP = Worker("herd-w-0", "1", ready=True)
DOWN = Worker("herd-w-1", "2", trouble=Trouble("ImagePullFailed", "herd-w-1: not found"))
BOTH = Facts(workers=(UP, Worker("herd-w-1", "2", ready=True)), settled=True, serving_ready=1, serving_current=True)
DONE = Progress(Stage(layout=plan(cluster())), Model("f", "m.gguf"), "f", "l", {"ok": True, "of": "l"})


def said(name: str, facts: Facts = BOTH, reached: Progress = DONE, refusals: tuple[str, ...] = (), **spec: Any) -> Any:
    made = status.of(cluster(**spec), facts, reached, {}, NOW, refusals)
    row = next(row for row in made["conditions"] if row["type"] == name)
    return row["status"], row["reason"], row["message"]


@pytest.mark.parametrize(
    ("facts", "spec", "refusals", "expected"),
    [
        (BOTH, {}, (), ("True", "AllReady", "2 of 2 workers are ready")),
        (BOTH, {"suspend": True}, (), ("False", "Suspended", "all workers are stopped; set spec.suspend to false")),
        (BOTH, {}, ("Service x: taken",), ("False", "Refused", "Service x: taken")),
        (Facts((UP, DOWN)), {}, (), ("False", "ImagePullFailed", "1 of 2 workers are ready: herd-w-1: not found")),
        (Facts((UP, Worker("herd-w-1"))), {}, (), ("False", "Starting", "1 of 2 workers are ready: herd-w-1 is not t")),
        (Facts((UP, Worker("b", "2"))), {}, (), ("False", "Starting", "1 of 2 workers are ready")),
        (Facts(BOTH.workers), {}, (), ("False", "Rolling", "2 of 2 workers are ready, and some are about to be repl")),
    ],
)
def test_workers_ready(facts: Facts, spec: Any, refusals: tuple[str, ...], expected: tuple[str, str, str]) -> None:
    word, reason, message = said("WorkersReady", facts, refusals=refusals, **spec)
    assert (word, reason) == expected[:2]
    assert message.startswith(expected[2])


def job(state: Any, message: str = "", **rest: Any) -> Job:
    return Job("uid", rest.pop("of", "f"), state, message, **rest)


GONE = Replaced("f", 1)
NO_MODEL = Progress(Stage(), None, "f")


@pytest.mark.parametrize(
    ("facts", "reached", "expected"),
    [
        (Facts(), DONE, ("True", "Available")),
        (Facts(), NO_MODEL, ("False", "Waiting")),
        (Facts(fetch=job("running", of="older")), NO_MODEL, ("False", "Waiting")),
        (Facts(fetch=job("running")), NO_MODEL, ("False", "Fetching")),
        (Facts(fetch=job("running", trouble=Trouble("VolumeNotBound", "x"))), NO_MODEL, ("False", "VolumeNotBound")),
        (Facts(fetch=job("failed", "gone")), NO_MODEL, ("False", "FetchFailed")),
        (Facts(fetch=job("failed", report={"reason": "NotFound"})), NO_MODEL, ("False", "NotFound")),
        (Facts(fetch=job("succeeded")), NO_MODEL, ("False", "FetchFailed")),
    ],
)
def test_model_available(facts: Facts, reached: Progress, expected: tuple[str, str]) -> None:
    assert said("ModelAvailable", facts, reached)[:2] == expected


def foreseen(**changes: Any) -> Progress:
    return Progress(Stage(), None, "f", forecast=Forecast(**({"asks": "h"} | changes)))


KNOWN = Header("h", GIB)


@pytest.mark.parametrize(
    ("facts", "reached", "expected"),
    [
        (Facts(), foreseen(), ("False", "Waiting", "the download has not begun")),
        (Facts(header=job("running", of="older")), foreseen(), ("False", "Waiting", "the download has not begun")),
        (
            Facts(header=job("running", of="h")),
            foreseen(),
            ("False", "Fetching", "the head of hf://org/repo/m.gguf"),
        ),
        (
            Facts(header=job("running", "no such host", of="h")),
            foreseen(),
            (
                "False",
                "Fetching",
                "the head of hf://org/repo/m.gguf is being read; see the Job's log; the last attempt",
            ),
        ),
        (
            Facts(header=job("running", of="h", trouble=Trouble("ImagePullFailed", "x"))),
            foreseen(),
            ("False", "ImagePullFailed", "x"),
        ),
        (
            Facts(header=job("failed", "gone", of="h", report={"reason": "NotFound"})),
            foreseen(),
            ("False", "NotFound", "gone; to try again, change the spec or delete the Job herd-header"),
        ),
        (Facts(header=job("succeeded", of="h")), foreseen(), ("False", "FetchFailed", "the Job herd-header left no")),
        (Facts(), foreseen(header=KNOWN), ("False", "Waiting", "the download has not begun")),
        (Facts(), foreseen(header=KNOWN, volume_shortage="small"), ("False", "VolumeTooSmall", "small")),
        (
            Facts(),
            foreseen(header=KNOWN, shortage="short"),
            ("False", "Waiting", "the download waits until the "),
        ),
        (
            Facts(fetch=job("running"), header=job("failed", of="h")),
            foreseen(),
            ("False", "Fetching", "hf://org/repo/m.gguf is being downloaded"),
        ),
    ],
)
def test_before_the_download(facts: Facts, reached: Progress, expected: tuple[str, str, str]) -> None:
    word, reason, message = said("ModelAvailable", facts, reached)
    assert (word, reason) == expected[:2]
    assert message.startswith(expected[2])


def test_a_plan_that_is_known_not_to_fit_until_a_load_says_more() -> None:
    short = Forecast("h", KNOWN, shortage="the model does not fit: 1 GiB is left over")
    stage = Stage(layout=plan(cluster()))
    waits = Progress(stage, None, "f", forecast=short)
    assert said("Planned", BOTH, waits) == ("False", "DoesNotFit", short.shortage)
    loaded = Progress(stage, Model("f", "m.gguf"), "f", "l", {"ok": True, "of": "l"}, forecast=short)
    assert said("Planned", BOTH, loaded)[0] == "True"


def test_a_file_that_the_load_cannot_read_is_no_model() -> None:
    unread = loading(
        model=Model("f", "m.gguf"), report={"reason": "ModelUnreadable", "message": "m.gguf: no such file"}
    )
    for name in ("ModelAvailable", "SplitVerified"):
        assert said(name, Facts(), unread) == (
            "False",
            "ModelUnreadable",
            "m.gguf: no such file; to try again, change the spec or delete the Job herd-load",
        )


def test_a_replaced_file_with_another_hash_says_what_to_do() -> None:
    report = {"reason": "ChecksumMismatch", "message": "m.gguf has the SHA-256 1, and should have 2"}
    for replaced, advice in (
        (GONE, "write the new one's hash into spec.model.sha256, or put the old one back and delete the Job herd-load"),
        (None, "to try again, change the spec or delete the Job herd-load"),
    ):
        unlike = loading(model=Model("f", "m.gguf"), report=report, replaced=replaced)
        for name in ("ModelAvailable", "SplitVerified"):
            word, reason, message = said(name, Facts(), unlike)
            assert (word, reason) == ("False", "ChecksumMismatch")
            assert message.endswith(advice)


def test_a_download_that_is_tried_again_says_why() -> None:
    _, reason, message = said("ModelAvailable", Facts(fetch=job("running", "no such host")), NO_MODEL)
    assert reason == "Fetching"
    assert message.endswith("the last attempt said: no such host")


def loading(**changes: Any) -> Progress:
    return Progress(**({"stage": Stage(), "loads": "l"} | changes))


@pytest.mark.parametrize(
    ("facts", "reached", "expected"),
    [
        (Facts(), DONE, ("True", "Verified", "every worker holds and computes its part")),
        (Facts(), loading(), ("Unknown", "Waiting", "")),
        (Facts(load=job("running", of="l")), loading(), ("Unknown", "Loading", "the Job herd-load loads")),
        (Facts(load=job("running", "worker gone", of="l")), loading(), ("Unknown", "Loading", "worker gone")),
        (
            Facts(load=job("running", of="l", trouble=Trouble("ImagePullFailed", "x"))),
            loading(),
            ("False", "ImagePullFailed", "x"),
        ),
        (
            Facts(),
            loading(report={"reason": "WrongResults", "message": "NaN"}),
            ("False", "WrongResults", "NaN; to try"),
        ),
        (
            Facts(),
            loading(
                report={"reason": "WorkerUnavailable", "message": "gone"}, again=20, failures=Failures("b", 2, "", "")
            ),
            ("False", "WorkerUnavailable", "gone; attempt 2 of 4, the next follows"),
        ),
        (Facts(), loading(again=5, failures=Failures("b", 1, "", "")), ("Unknown", "Pausing", "load 1 has failed")),
        (Facts(), loading(failures=Failures("b", 4, "", "")), ("False", "TooManyFailures", "4 loads in a row")),
        (
            Facts(),
            loading(replaced=GONE, again=20, failures=Failures("b", 1, "", "")),
            (
                "False",
                "ModelReplaced",
                "was replaced on its volume after it had been proven; what is there now will be loaded",
            ),
        ),
        (
            Facts(load=job("running", of="l")),
            loading(replaced=GONE),
            ("Unknown", "Loading", "was replaced on its volume after it had been proven: the Job herd-load loads"),
        ),
        (
            Facts(),
            loading(replaced=GONE, failures=Failures("b", 4, "", "")),
            ("False", "TooManyFailures", "see that all nodes show the same file"),
        ),
        (Facts(), loading(replaced=Replaced("f", 1, proven=True)), ("Unknown", "Waiting", "")),
    ],
)
def test_split_verified(facts: Facts, reached: Progress, expected: tuple[str, str, str]) -> None:
    word, reason, message = said("SplitVerified", facts, reached)
    assert (word, reason) == expected[:2]
    assert expected[2] in message


@pytest.mark.parametrize(
    ("facts", "reached", "spec", "expected"),
    [
        (BOTH, DONE, {}, ("True", "Serving")),
        (BOTH, DONE, {"serving": {"replicas": 2}}, ("False", "Starting")),
        (Facts(serving_ready=1), DONE, {}, ("False", "Starting")),
        (Facts(serving_trouble=Trouble("Crashing", "x")), DONE, {}, ("False", "Crashing")),
        (BOTH, loading(), {}, ("False", "Waiting")),
        (BOTH, DONE, {"serving": {"enabled": False}}, ("False", "Disabled")),
        (BOTH, DONE, {"suspend": True}, ("False", "Suspended")),
    ],
)
def test_serving(facts: Facts, reached: Progress, spec: Any, expected: tuple[str, str]) -> None:
    assert said("Serving", facts, reached, **spec)[:2] == expected


def test_ready_names_what_is_wrong_before_what_only_waits() -> None:
    broken = Facts(workers=(UP, DOWN), fetch=job("running"))
    assert said("Ready", broken, NO_MODEL)[:2] == ("False", "ImagePullFailed")
    waits = Facts(workers=(UP, Worker("herd-w-1", "2")), fetch=job("failed", "no such file"))
    word, reason, message = said("Ready", waits, NO_MODEL)
    assert (word, reason) == ("False", "FetchFailed")
    assert message.startswith("ModelAvailable: no such file")
    assert said("Ready") == ("True", "Ready", "the model is served")


def test_a_time_changes_only_with_the_status() -> None:
    later = NOW + timedelta(hours=1)
    first = status.of(cluster(), Facts((UP, DOWN)), DONE, {}, NOW)
    second = status.of(cluster(), Facts((UP, Worker("herd-w-1"))), DONE, first, later)
    third = status.of(cluster(), BOTH, DONE, second, later)
    times = [made["conditions"][0]["lastTransitionTime"] for made in (first, second, third)]
    assert times == ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"]
    assert second["conditions"][0]["reason"] != first["conditions"][0]["reason"]
    assert status.of(cluster(), BOTH, DONE, third, later + timedelta(1)) == third


def test_news_are_what_a_person_would_want_to_hear() -> None:
    def row(kind: str, word: str, reason: str) -> dict[str, str]:
        return {"type": kind, "status": word, "reason": reason}

    before = {"conditions": [row("WorkersReady", "False", "Starting"), row("Ready", "False", "Starting")]}
    quiet = [row("WorkersReady", "False", "Rolling"), row("Planned", "False", "WaitingForWorkers")]
    assert status.news(before, {"conditions": quiet}) == []
    broken = [row("WorkersReady", "False", "Crashing"), row("Ready", "False", "Crashing")]
    assert status.news(before, {"conditions": broken}) == broken[:1]
    good = [row("WorkersReady", "True", "AllReady"), row("Ready", "True", "Ready")]
    assert status.news(before, {"conditions": good}) == good
    assert status.news({"conditions": good}, {"conditions": good}) == []
    assert status.news({}, {"conditions": [row("Ready", "False", "SpecInvalid")]}) == [
        row("Ready", "False", "SpecInvalid")
    ]


def test_only_what_the_schema_has_a_place_for_is_said() -> None:
    """The API server drops the rest, and what it dropped would be written again in every cycle."""
    report = {
        "of": "l",
        "ok": True,
        "tokensPerSecond": "fast",
        "loadSeconds": 3,
        "text": "x",
        "bytesCached": True,
        "stages": [{"worker": "a", "device": 0, "odd": 1, "layers": 7}, "none"],
    }
    made = status.of(cluster(), BOTH, Progress(Stage(), None, "f", "l", report), {}, NOW)
    assert made["report"] == {"of": "l", "ok": True, "loadSeconds": 3, "stages": [{"worker": "a", "device": 0}]}
    assert set(made) <= set(STATUS["properties"])


def test_the_plan_with_what_was_found_on_each_device() -> None:
    wanted = cluster(workers=[{"name": "g", "device": "cuda", "devicesPerWorker": 2}])
    places = layout.seats(wanted.spec, "herd", "farm")
    found = layout.of(wanted.spec, places, {"herd-g-0": [GIB, GIB]}, {"herd-g-0": "1"})
    stages = [{"worker": places[0].endpoint, "device": index, "layers": f"{index}", "bytes": 9} for index in (0, 1)]
    made = status.of(
        wanted, BOTH, Progress(Stage(layout=found), loads="l", report={"of": "l", "stages": stages}), {}, NOW
    )
    assert made["plan"] == [
        {"worker": "herd-g-0", "device": "cuda:0", "proportion": 1.0, "layers": "0", "bytes": 9},
        {"worker": "herd-g-0", "device": "cuda:1", "proportion": 1.0, "layers": "1", "bytes": 9},
    ]


def test_the_plan_as_it_is_foreseen_until_the_load_has_said_what_lies_where() -> None:
    wanted = cluster()
    found = plan(wanted)
    header = Header("h", GIB, "llama", 8, ((20, 8), (5, 1)), 4, "eight layers")
    known = Forecast("h", header, rows=(("0-7 + output", 165), ("", 0)))
    made = status.of(wanted, BOTH, Progress(Stage(layout=found), None, "f", forecast=known), {}, NOW)
    assert made["plan"] == [
        {"worker": "herd-w-0", "device": "cpu", "proportion": 1.0, "layers": "0-7 + output", "bytes": 165},
        {"worker": "herd-w-1", "device": "cpu", "proportion": 1.0},
    ]
    assert made["header"] == {
        "of": "h",
        "bytes": GIB,
        "architecture": "llama",
        "layers": 8,
        "units": [[20, 8], [5, 1]],
        "reserve": 4,
        "message": "eight layers",
    }
    report = {"of": "l", "stages": [{"worker": found.endpoints[0], "device": 0, "layers": "0-3", "bytes": 9}]}
    loaded = Progress(Stage(layout=found), None, "f", "l", report, forecast=known)
    assert [row["layers"] for row in status.of(wanted, BOTH, loaded, {}, NOW)["plan"][:1]] == ["0-3"]


def test_a_spec_that_is_not_valid_leaves_the_rest_as_it_was() -> None:
    good = status.of(cluster(), BOTH, DONE, {}, NOW)
    made = status.invalid(2, "spec.workers: must not be empty", good, NOW + timedelta(1))
    assert made["workers"] == "2/2"
    assert [row["status"] for row in made["conditions"]] == ["True"] * 5 + ["False"]
    assert made["conditions"][-1]["reason"] == "SpecInvalid"
    assert status.invalid(2, "spec.workers: must not be empty", made, NOW + timedelta(2)) == made


@pytest.mark.parametrize(("claim", "there"), [("Bound", True), ("Pending", True), ("Lost", False), (None, False)])
def test_a_model_on_a_claim_is_there_when_the_claim_is(claim: str | None, there: bool) -> None:
    wanted = cluster(model={"source": "pvc://models/a/m.gguf"})
    reached = progress.of(wanted, Facts(claim=claim), None, {}, NOW)
    assert (reached.model is not None) is there
    assert observed.read(wanted, []).claim is None
