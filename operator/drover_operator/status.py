"""Spec, facts and progress -> the status: conditions with reasons, endpoints, plan, report. Pure; time is an argument.

Each condition is a row of CONDITIONS and a function. A condition that says the same as before keeps its time, so that
the status of a cluster in which nothing happens stays the same to the letter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from drover.sizes import format_size
from drover_operator import layout as layouts
from drover_operator import names, pods
from drover_operator.crd_status import STATUS
from drover_operator.layout import Layout
from drover_operator.observed import Facts, Job
from drover_operator.progress import MOST_FAILURES, Progress, stamp
from drover_operator.target import Target

Status = dict[str, Any]
Word = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Said:
    """What is said of one condition."""

    status: Word
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class View:
    """All that a condition may depend on."""

    target: Target
    facts: Facts
    progress: Progress
    refusals: Sequence[str]
    """What the API server would not take, one sentence each."""


def of(
    target: Target,
    facts: Facts,
    progress: Progress,
    before: Mapping[str, Any],
    now: datetime,
    refusals: Sequence[str] = (),
) -> Status:
    """The whole status."""
    view = View(target, facts, progress, refusals)
    said: dict[str, Said] = {name: say(view) for name, say in CONDITIONS.items()}
    said["Ready"] = _ready(view, said)
    layout = progress.stage.layout
    made: Status = {
        "observedGeneration": target.generation,
        "conditions": [_condition(name, what, target.generation, before, now) for name, what in said.items()],
        "workers": f"{sum(worker.ready for worker in facts.workers)}/{len(facts.workers)}",
        "endpoints": _endpoints(target, facts, layout),
    }
    if layout is not None:
        made["plan"] = _plan(layout, progress)
    if progress.report is not None:
        made["report"] = {name: progress.report[name] for name in REPORTED if progress.report.get(name) is not None}
    if progress.forecast.header is not None:
        header = progress.forecast.header
        made["header"] = asdict(header) | {"units": [list(run) for run in header.units]}
    if progress.model is not None and target.spec.model.scheme != "pvc":
        made["model"] = {name: value for name, value in asdict(progress.model).items() if value}
    if progress.replaced is not None:
        made["modelReplaced"] = asdict(progress.replaced)
    if progress.failures is not None:
        made["loadFailures"] = asdict(progress.failures)
    pruned: Status = _pruned(made, STATUS)
    return pruned


def invalid(generation: int, fault: str, before: Mapping[str, Any], now: datetime) -> Status:
    """The status of a spec that is not valid: what there was, and one condition that says why nothing happens."""
    said = Said("False", "SpecInvalid", f"{fault}; nothing is done until the spec is changed")
    kept = [row for row in before.get("conditions") or () if row["type"] != "Ready"]
    ready = _condition("Ready", said, generation, before, now)
    return {**before, "observedGeneration": generation, "conditions": [*kept, ready]}


def news(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Conditions that a person would want to hear of: what came true, what began, what went wrong; not that all waits.

    Ready repeats what another condition says, unless it is true or the only one that says it.
    """
    known = {row["type"]: (row["status"], row["reason"]) for row in before.get("conditions") or ()}
    rows: Sequence[Mapping[str, Any]] = after["conditions"]
    changed = [row for row in rows if known.get(row["type"]) != (row["status"], row["reason"])]
    told = [row for row in changed if row["status"] == "True" or row["reason"] not in SILENT]
    others = {row["reason"] for row in told if row["type"] != "Ready"}
    return [row for row in told if row["type"] != "Ready" or row["status"] == "True" or row["reason"] not in others]


REPORTED = (
    "of",
    "ok",
    "reason",
    "message",
    "predictedTokensPerSecond",
    "tokensPerSecond",
    "promptTokensPerSecond",
    "loadSeconds",
    "bytesUploaded",
    "bytesCached",
    "stages",
    "fingerprint",
)


def _workers_ready(view: View) -> Said:
    workers = view.facts.workers
    ready = sum(worker.ready for worker in workers)
    count = f"{ready} of {len(workers)} workers are ready"
    if view.target.spec.suspend:
        return Said("False", "Suspended", "all workers are stopped; set spec.suspend to false to start them")
    if view.refusals:
        return Said("False", "Refused", "; ".join(view.refusals))
    trouble = next((worker.trouble for worker in workers if not worker.ready and worker.trouble), None)
    if trouble:
        return Said("False", trouble.reason, f"{count}: {trouble.message}")
    missing = [worker.name for worker in workers if not worker.uid]
    if missing:
        return Said("False", "Starting", f"{count}: {missing[0]} is not there yet; see the events of its StatefulSet")
    if ready < len(workers):
        return Said("False", "Starting", f"{count}")
    if not view.facts.settled:
        return Said("False", "Rolling", f"{count}, and some are about to be replaced")
    return Said("True", "AllReady", count)


def _model_available(view: View) -> Said:
    facts, model, report = view.facts, view.progress.model, view.progress.report or {}
    if model is not None and report.get("reason") in UNREADABLE:
        return Said("False", str(report["reason"]), f"{report.get('message', '')}{_retry(view)}")
    if model is not None:
        size = f", {format_size(model.bytes)}" if model.bytes else ""
        return Said("True", "Available", model.message or f"{model.file}{size}")
    claim, _ = pods.model_claim(view.target.spec.model, view.target.name)
    if view.target.spec.model.scheme == "pvc":
        return Said("False", "ClaimMissing", f"there is no usable claim {claim}: make it, with the model on it")
    if facts.fetch is None or facts.fetch.of != view.progress.fetches:
        return _before_the_download(view)
    source = view.target.spec.model.source
    return _asking(facts.fetch, names.fetch(view.target.name), f"{source} is being downloaded")


def _before_the_download(view: View) -> Said:
    job, foreseen = view.facts.header, view.progress.forecast
    if view.target.spec.suspend:
        return Said("False", "Suspended", "the download has not begun")
    if foreseen.volume_shortage:
        return Said("False", "VolumeTooSmall", foreseen.volume_shortage)
    if foreseen.shortage:
        return Said("False", "Waiting", "the download waits until the workers have room for the model")
    if foreseen.header is None and job is not None and job.of == foreseen.asks:
        source = view.target.spec.model.source
        return _asking(job, names.header(view.target.name), f"the head of {source} is being read")
    return Said("False", "Waiting", "the download has not begun")


def _asking(job: Job, name: str, doing: str) -> Said:
    """What is said of a Job that asks the model's source, until what it was to do is done."""
    if job.state == "failed":
        why = (job.report or {}).get("reason") or "FetchFailed"
        return Said("False", why, f"{job.message}; to try again, change the spec or delete the Job {name}")
    if job.state == "succeeded":
        return Said("False", "FetchFailed", f"the Job {name} left no report; delete it")
    if job.trouble:
        return Said("False", job.trouble.reason, job.trouble.message)
    last = f"; the last attempt said: {job.message}" if job.message else ""
    return Said("False", "Fetching", f"{doing}; see the Job's log{last}")


UNREADABLE = ("ModelUnreadable", "ChecksumMismatch")
"""What the load Job says of a file that is not there, or not the model."""


def _retry(view: View) -> str:
    report = view.progress.report or {}
    if _was_replaced(view) and report.get("reason") == "ChecksumMismatch":
        return (
            "; the file was replaced after it had been proven: write the new one's hash into spec.model.sha256, or put "
            f"the old one back and delete the Job {names.load(view.target.name)}"
        )
    return f"; to try again, change the spec or delete the Job {names.load(view.target.name)}"


def _was_replaced(view: View) -> bool:
    """Whether the model that is there took the place of a proven one, and is not proven itself."""
    return view.progress.replaced is not None and not view.progress.replaced.proven


def _replacement(view: View) -> str:
    model = view.progress.model
    return f"{model.file if model else 'the model'} was replaced on its volume after it had been proven"


def _planned(view: View) -> Said:
    report, layout, trouble = view.progress.report, view.progress.stage.layout, view.progress.plan_trouble
    if trouble:
        return Said("False", trouble.reason, trouble.message)
    if layout is None:
        return Said("False", "WaitingForWorkers", "workers are asked for their memory once all are ready")
    if report and report.get("reason") in UNPLANNABLE:
        return Said("False", str(report["reason"]), str(report.get("message", "")))
    if not report and view.progress.forecast.shortage:
        return Said("False", "DoesNotFit", view.progress.forecast.shortage)
    how = "as spec.split says" if layout.explicit else "by memory"
    return Said("True", "Planned", f"layers are shared out {how}: {layout.proportions}")


UNPLANNABLE = ("DoesNotFit", "InvalidSplit")


def _split_verified(view: View) -> Said:
    progress, report, job = view.progress, view.progress.report, view.facts.load
    name = names.load(view.target.name)
    if report and report.get("ok"):
        return Said("True", "Verified", str(report.get("message") or "every worker holds and computes its part"))
    if report:
        count = progress.failures.count if progress.failures else 1
        more = _retry(view)
        if progress.again:
            more = f"; attempt {count} of {MOST_FAILURES}, the next follows"
        return Said("False", str(report.get("reason") or "LoadFailed"), f"{report.get('message', '')}{more}")
    if job and job.of == progress.loads and job.state == "running":
        if job.trouble:
            return Said("False", job.trouble.reason, job.trouble.message)
        last = f"; the last attempt said: {job.message}" if job.message else ""
        first = f"{_replacement(view)}: " if _was_replaced(view) else ""
        return Said("Unknown", "Loading", f"{first}the Job {name} loads the model into the workers{last}")
    if progress.failures and progress.failures.count >= MOST_FAILURES:
        if _was_replaced(view):
            return Said("False", "TooManyFailures", f"{MOST_FAILURES} {NOT_HELD}")
        return Said("False", "TooManyFailures", f"{MOST_FAILURES} loads in a row have failed; change the spec to go on")
    if _was_replaced(view) and not view.target.spec.suspend:
        return Said("False", "ModelReplaced", f"{_replacement(view)}; what is there now will be loaded and proven anew")
    if progress.failures and progress.again:
        return Said("Unknown", "Pausing", f"load {progress.failures.count} has failed; the next follows after a pause")
    if view.target.spec.suspend:
        return Said("Unknown", "Suspended", "nothing is loaded while the cluster is suspended")
    return Said("Unknown", "Waiting", "a load waits for workers, model and plan")


NOT_HELD = (
    "loads in a row have failed, or were of another model than those who serve find on the volume: see that all nodes "
    "show the same file, and that nobody writes to it; change the spec to go on"
)


def _serving(view: View) -> Said:
    facts, asked = view.facts, view.target.spec.serving
    if not asked.enabled:
        return Said("False", "Disabled", "spec.serving.enabled is false; use the workers through status.endpoints")
    if view.target.spec.suspend:
        return Said("False", "Suspended", "serving is stopped")
    if not view.progress.verified:
        return Said("False", "Waiting", "serving starts once the split is verified")
    if facts.serving_ready >= asked.replicas and facts.serving_current:
        return Said("True", "Serving", f"{facts.serving_ready} of {asked.replicas} coordinators answer")
    if facts.serving_trouble:
        return Said("False", facts.serving_trouble.reason, facts.serving_trouble.message)
    return Said("False", "Starting", f"{facts.serving_ready} of {asked.replicas} coordinators answer")


CONDITIONS: dict[str, Callable[[View], Said]] = {
    "WorkersReady": _workers_ready,
    "ModelAvailable": _model_available,
    "Planned": _planned,
    "SplitVerified": _split_verified,
    "Serving": _serving,
}


def _ready(view: View, said: Mapping[str, Said]) -> Said:
    """All of them; of those that are not, a failure before one that only waits."""
    needed = [name for name in said if name != "Serving" or view.target.spec.serving.enabled]
    if view.target.spec.suspend:
        return Said("False", "Suspended", "spec.suspend is true; model and caches are kept")
    missing = [name for name in needed if said[name].status != "True"]
    if not missing:
        what = "the model is served" if view.target.spec.serving.enabled else "the workers hold the model's caches"
        return Said("True", "Ready", what)
    first = next((name for name in missing if said[name].reason not in PATIENT), missing[0])
    return Said("False", said[first].reason, f"{first}: {said[first].message}")


PATIENT = {"Waiting", "WaitingForWorkers", "Starting", "Rolling", "Fetching", "Loading", "Pausing"}
"""Reasons that time alone mends."""
WANTED = {"Suspended", "Disabled"}
"""Reasons that the spec asks for."""
SILENT = (PATIENT | {"Disabled"}) - {"Fetching", "Loading", "Pausing"}
"""Reasons of which no event is made."""


def _condition(name: str, said: Said, generation: int, before: Mapping[str, Any], now: datetime) -> Status:
    known = next((row for row in before.get("conditions") or () if row["type"] == name), None)
    same = known is not None and known["status"] == said.status
    return {
        "type": name,
        "status": said.status,
        "reason": said.reason,
        "message": said.message,
        "observedGeneration": generation,
        "lastTransitionTime": known["lastTransitionTime"] if same and known else stamp(now),
    }


def _endpoints(target: Target, facts: Facts, layout: Layout | None) -> Status:
    made: Status = {
        "rpc": [seat.endpoint for seat in layouts.seats(target.spec, target.name, target.namespace)],
    }
    if target.spec.serving.enabled:
        made["openai"] = f"http://{target.name}.{target.namespace}.svc:{target.spec.serving.port}/v1"
    if facts.exposed:
        made["exposed"] = list(facts.exposed)
    if layout is not None:
        made["llamaServerArgs"] = layout.arguments
    return made


def _pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    """What the schema has a place for; the API server would drop the rest, and it would be news in every cycle."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {name: _pruned(part, known[name]) for name, part in value.items() if _fits(part, known.get(name))}
    if isinstance(value, list):
        return [_pruned(item, schema["items"]) for item in value if _fits(item, schema["items"])]
    return value


def _fits(value: Any, schema: Mapping[str, Any] | None) -> bool:
    if schema is None:
        return False
    if isinstance(value, bool):
        return bool(schema["type"] == "boolean")
    return isinstance(value, _TYPES[schema["type"]])


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _plan(layout: Layout, progress: Progress) -> list[Status]:
    """The shares, and what lies on each: as the load Job says, else as the model's header foretells."""
    report = progress.report or {}
    stages = {(stage.get("worker"), stage.get("device", 0)): stage for stage in report.get("stages") or ()}
    foreseen = [{"layers": layers, "bytes": size} if size else {} for layers, size in progress.forecast.rows]
    rows, counts = [], dict.fromkeys(layout.endpoints, 0)
    for index, share in enumerate(layout.shares):
        stage = stages.get((share.endpoint, counts[share.endpoint])) or (foreseen[index] if foreseen else {})
        counts[share.endpoint] += 1
        row = {"worker": share.worker, "device": share.device, "proportion": share.proportion}
        rows.append(row | {name: stage[name] for name in ("layers", "bytes") if stage.get(name) is not None})
    return rows
