"""How far an InferenceCluster has come, and what is next: spec, facts and what the status remembers. Pure.

One thing after another: workers, the model's header and then the model, the plan, the load Job, serving. A model that
is known not to fit is not downloaded. A plan is in force alone: before the load Job starts, whoever serves under an
older plan is stopped. What a Job found out is remembered in the status, so that neither the Job nor its pod has to
stay. A proof is of one model: if those who serve find another one on the volume, that counts as a failed load, and what
is there now is loaded and proven anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from drover_operator import forecast, names, pods
from drover_operator import layout as layouts
from drover_operator.desired import Stage
from drover_operator.forecast import Forecast
from drover_operator.layout import Layout
from drover_operator.observed import Facts, Job
from drover_operator.target import Target
from drover_operator.troubles import Trouble

MOST_FAILURES = 4
FIRST_PAUSE = 20
NEVER = float("inf")
TRANSIENT = ("WorkerUnavailable", "LoadFailed", "ModelChanged")
"""Reasons of a failed load that may be gone at the next one."""
Remembered = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is there: hash of its source, its file on the volume, what is worth saying about it."""

    of: str
    file: str
    bytes: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A model that was replaced after it had been proven: hash of its source, how often; is the present one proven?"""

    of: str
    count: int
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """Loads in a row that failed, or whose proof did not hold, for the same model, plan and image."""

    of: str
    count: int
    job: str
    time: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What there is, what is to be, and when to look again."""

    stage: Stage
    model: Model | None = None
    fetches: str = ""
    loads: str = ""
    report: Remembered | None = None
    """What the load Job of this model, plan and workers found; None if none did yet."""
    plan_trouble: Trouble | None = None
    failures: Failures | None = None
    stale_jobs: tuple[str, ...] = ()
    forecast: Forecast = field(default_factory=Forecast)
    replaced: Replaced | None = None
    again: float | None = None
    """Seconds after which to look again though nothing changes."""

    @property
    def verified(self) -> bool:
        """Whether the load Job proved the split."""
        return bool(self.report and self.report.get("ok"))


def needs_probe(target: Target, facts: Facts) -> bool:
    """Whether workers must be asked what they offer: all are ready, and the published plan is not about them."""
    if target.spec.suspend or not facts.settled or not all(worker.ready for worker in facts.workers):
        return False
    plan = published(target, facts)
    return plan is None or dict(plan.pods) != identity(facts)


def published(target: Target, facts: Facts) -> Layout | None:
    """The published plan, if it still is about the workers that the spec wants."""
    places = layouts.seats(target.spec, target.name, target.namespace)
    return facts.published if facts.published and layouts.is_for(facts.published, target.spec, places) else None


def identity(facts: Facts) -> dict[str, str]:
    """Which pods the workers are."""
    return {worker.name: worker.uid for worker in facts.workers}


def of(
    target: Target,
    facts: Facts,
    layout: Layout | None,
    before: Remembered,
    now: datetime,
    trouble: Trouble | None = None,
) -> Progress:
    """What is next; `before` is the status as it stands, `layout` the plan for the workers as they are."""
    model, fetches = _model(target, facts, before)
    foreseen = forecast.of(target, facts.header, layout, before, model.bytes or 0 if model else None)
    replaced = _replaced(before, fetches)
    loads, base = _hashes(target, layout, fetches, replaced)
    report = _report(facts.load, loads, before)
    failures = _failures(facts.load, report, loads, base, before, now)
    if report and report.get("ok"):
        if loads in facts.refuted:
            replaced = Replaced(fetches, replaced.count + 1 if replaced else 1)
            failures = _one_more(_counted(before, base), base, loads, now)
            loads, report = _hashes(target, layout, fetches, replaced)[0], None
        elif replaced is not None:  # what made it be loaded anew stays counted until all have found it
            replaced = replace(replaced, proven=True)
            failures = None if _all_serve(target, facts) else _counted(before, base)
    pause = _pause(failures, base, now)
    retry = _transient(report) and failures is not None and pause == 0
    stale = _stale(target, facts, foreseen, fetches, "again" if retry else loads)
    start = (
        model is not None
        and layout is not None
        and report is None
        and not foreseen.shortage
        and not target.spec.suspend
        and dict(layout.pods) == identity(facts)
        and facts.settled
        and not (facts.load or facts.coordinators or facts.load_pods)
        and pause == 0
    )
    stage = Stage(
        reads=foreseen.asks if _header_wanted(target, facts, foreseen, model) else None,
        fetches=fetches if _fetch_wanted(target, facts, foreseen, model) else None,
        layout=layout,
        file=model.file if model else "",
        loads=loads,
        expect=foreseen.expect,
        load=start,
        serve=bool(report and report.get("ok")),
        fingerprint=str(report.get("fingerprint") or "") if report and report.get("ok") else "",
        replaced=replaced is not None,
    )
    again = pause if 0 < pause < NEVER and (report is None or _transient(report)) else None
    return Progress(stage, model, fetches, loads, report, trouble, failures, stale, foreseen, replaced, again)


def _model(target: Target, facts: Facts, before: Remembered) -> tuple[Model | None, str]:
    """The model if it is there, and the hash of its source."""
    spec = target.spec.model
    fetches = names.digest([spec.source, spec.sha256])
    claim, path = pods.model_claim(spec, target.name)
    if spec.scheme == "pvc":
        there = facts.claim in ("Bound", "Pending")
        return (Model(fetches, path, message=f"{path} on the claim {claim}") if there else None), fetches
    known = before.get("model") or {}
    job = facts.fetch
    if job and job.of == fetches and job.state == "succeeded" and job.report and job.report.get("path"):
        file = str(job.report["path"]).removeprefix(f"{pods.MODELS}/")
        return Model(fetches, file, job.report.get("bytes"), job.message), fetches
    if known.get("of") == fetches and known.get("file"):
        return Model(fetches, known["file"], known.get("bytes"), known.get("message", "")), fetches
    return None, fetches


def _header_wanted(target: Target, facts: Facts, foreseen: Forecast, model: Model | None) -> bool:
    """A new header Job: nothing was downloaded, nothing is known of it, and nobody is asking."""
    idle = facts.header is None and facts.header_pods == 0
    unknown = bool(foreseen.asks) and foreseen.header is None
    return unknown and model is None and idle and not target.spec.suspend


def _fetch_wanted(target: Target, facts: Facts, foreseen: Forecast, model: Model | None) -> bool:
    """A new fetch Job: nothing was downloaded, it may fit, none is there, and nothing of an older one still writes."""
    idle = facts.fetch is None and facts.fetch_pods == 0
    return foreseen.fits and model is None and idle and not target.spec.suspend


def _replaced(before: Remembered, fetches: str) -> Replaced | None:
    """What is remembered of the model of this source."""
    known = before.get("modelReplaced") or {}
    return Replaced(fetches, known["count"], known["proven"]) if known.get("of") == fetches else None


def _all_serve(target: Target, facts: Facts) -> bool:
    """Every coordinator there is to be has found the model that was proven."""
    asked = target.spec.serving
    return not asked.enabled or (facts.serving_current and facts.serving_ready >= asked.replicas)


def _hashes(target: Target, layout: Layout | None, fetches: str, replaced: Replaced | None) -> tuple[str, str]:
    """What a load is about: with the workers' identity and how often the model was replaced, and without."""
    if layout is None:
        return "", ""
    spec = target.spec
    about = [
        fetches,
        spec.context,
        spec.parallel,
        spec.cache_types.k,
        spec.cache_types.v,
        layout.endpoints,
        layout.proportions,
        target.serving_image,
    ]
    times = [replaced.count] if replaced else []
    return names.digest([about, dict(layout.pods), *times]), names.digest(about)


def _report(job: Job | None, loads: str, before: Remembered) -> Remembered | None:
    """What was found about this load: by the Job that has ended, or as it is remembered."""
    if not loads:
        return None
    if job is not None and job.of == loads and job.state != "running":
        if job.report is not None:
            return {**job.report, "of": loads, "ok": job.state == "succeeded" and bool(job.report.get("ok"))}
        if (before.get("report") or {}).get("of") != loads:
            said = job.message or "the load Job left no report; see its log"
            return {"of": loads, "ok": False, "reason": "LoadFailed", "message": said}
    if job is not None and job.of == loads and job.state == "running":
        return None
    remembered: Remembered = before.get("report") or {}
    return remembered if remembered.get("of") == loads and (remembered.get("ok") or job is not None) else None


def _failures(
    job: Job | None, report: Remembered | None, loads: str, base: str, before: Remembered, now: datetime
) -> Failures | None:
    """Failures in a row, this one counted once; a success or another plan begins anew."""
    counted = _counted(before, base)
    if report and report.get("ok"):
        return None
    if job is None or job.of != loads or report is None or (counted and counted.job == job.uid):
        return counted
    return _one_more(counted, base, job.uid, now)


def _counted(before: Remembered, base: str) -> Failures | None:
    known = before.get("loadFailures") or {}
    counted = Failures(known["of"], known["count"], known["job"], known["time"]) if known else None
    return None if counted is not None and base and counted.of != base else counted


def _one_more(counted: Failures | None, base: str, which: str, now: datetime) -> Failures:
    return Failures(base, (counted.count if counted else 0) + 1, which, stamp(now))


def _pause(failures: Failures | None, base: str, now: datetime) -> float:
    """Seconds until the next load may start; twice as long after each failure, and for ever after too many."""
    if failures is None or failures.of != base:
        return 0
    if failures.count >= MOST_FAILURES:
        return NEVER
    due = datetime.fromisoformat(failures.time) + timedelta(seconds=FIRST_PAUSE * 2 ** (failures.count - 1))
    return max(0.0, (due - now).total_seconds())


def _transient(report: Remembered | None) -> bool:
    return bool(report and not report.get("ok") and report.get("reason") in TRANSIENT)


def _stale(target: Target, facts: Facts, foreseen: Forecast, fetches: str, loads: str) -> tuple[str, ...]:
    """Jobs about something else than what is wanted, a download of what does not fit, and what runs while suspended."""
    found = []
    downloading = facts.fetch is not None and facts.fetch.state == "running"
    useless = downloading and bool(foreseen.volume_shortage or foreseen.shortage)
    for name, job, wanted in (
        (names.header(target.name), facts.header, foreseen.asks or "none"),
        (names.fetch(target.name), facts.fetch, fetches if foreseen.asks and not useless else "none"),
        (names.load(target.name), facts.load, loads),
    ):
        if job is None or job.terminating:
            continue
        if (wanted and job.of != wanted) or (target.spec.suspend and job.state == "running"):
            found.append(name)
    return tuple(found)


def stamp(now: datetime) -> str:
    """A time as Kubernetes writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
