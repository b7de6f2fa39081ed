"""What a run says on its first and its last lines, and as JSON: from the study in the storage, and from the clock."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from tuner.assignment import Assignment
from tuner.clock import Stopwatch
from tuner.prepare import Prepared
from tuner.progress import clean, duration, listed, readable
from tuner.results import Event, Finished, Spent, summarize
from tuner.storage import masked, sqlite_path
from tuner.study import OpenedStudy, target_of

PARTS = {
    "start": "imports, study file, device",
    "data": "loading data",
    "plan": "measuring what is fastest",
    "sampler": "sampler",
    "pruner": "pruner",
    "storage": "storage",
    "build": "building models",
    "train": "training",
    "validate": "validation",
    "wait": "waiting for others",
    "display": "display",
}
"""The parts of a worker's time in the order of the table, and in words."""


@dataclass
class Ledger:
    """What this command's events add up to."""

    watch: Stopwatch
    ended: list[Finished] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    workers: int = 0

    def add(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Finished):
            self.ended.append(event)
        elif isinstance(event, Spent):
            self.workers += 1
            for part, seconds in event.parts.items():
                self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass(frozen=True)
class Outcome:
    """A run's end. Times in seconds; `parts` are summed over the workers; `best` is the study's, not the run's."""

    study: str
    storage: str
    device: str
    added: int
    states: Mapping[str, int]
    seconds: float
    trials_per_minute: float
    seconds_per_trial: float | None
    parts: Mapping[str, float]
    complete: int
    pruned: int
    failed: int
    objectives: tuple[str, ...]
    best: Mapping[str, Any] | None
    front: tuple[int, ...]
    weights: str | None
    left: int | None
    commands: Mapping[str, str]


def first_lines(
    ready: Prepared, opened: OpenedStudy, sampler: str, goal: int | None, timeout: float | None
) -> Iterator[str]:
    """Study, device and search, as they are going to be; stderr's first lines."""
    summary = opened.summary
    where = f"{opened.study.study_name} in {masked(ready.url)}"
    if opened.resumed:
        best = "none complete"
        if summary.best is not None:
            best = f"best {ready.target.labels[0]} {readable(summary.best.values[0])} (trial {summary.best.number})"
        counts = f"{summary.complete} complete, {summary.pruned} pruned, {summary.failed} failed"
        running = f", {summary.running} running" if summary.running else ""
        yield f"study    {where}: resumed, {counts}{running}; {best}"
    else:
        yield f"study    {where}: new"
    yield f"device   {ready.plan.text}"
    amount = "trials until the time is over" if goal is None else f"{goal} trial{'s' if goal != 1 else ''} to add"
    limit = f", none starts after {duration(timeout)}" if timeout is not None else ""
    yield f"search   {sampler} sampler, {ready.pruner} pruner, {amount}{limit}"
    for note in ready.notes:
        yield f"note     {note}"


def plan_rows(ready: Prepared) -> list[dict[str, Any]]:
    """What was timed, the quickest way first: lanes, threads, trial-epochs per second of a worker, those in stacks."""
    timings = sorted(ready.timings, key=lambda timing: timing.seconds)
    return [
        {
            "lanes": timing.lanes,
            "threads": timing.threads,
            "trial_epochs_per_second": 1 / timing.seconds,
            "in_stacks": timing.stacked,
        }
        for timing in timings
    ]


def plan_as_json(ready: Prepared) -> str:
    """The plan and what was timed as one JSON document."""
    plan = ready.plan
    chosen = {"device": str(plan.device), "workers": plan.workers, "threads": plan.threads, "lanes": plan.lanes}
    return json.dumps({"plan": chosen, "measured": plan_rows(ready)}, indent=2)


def plan_as_text(ready: Prepared) -> str:
    """The plan and what was timed as a table."""
    lines = [f"plan     {ready.plan.text}", "", "lanes  threads  trial-epochs/s of a worker  lanes in stacks"]
    for row in plan_rows(ready):
        lines.append(
            f"{row['lanes']:5}  {row['threads']:7}  {row['trial_epochs_per_second']:26.0f}  {row['in_stacks']:15}"
        )
    return "\n".join(lines if ready.timings else lines[:1])


def measure(ready: Prepared, run: Assignment, opened: OpenedStudy, ledger: Ledger, total: int | None) -> Outcome:
    """Read the study once more and add up the run."""
    trials = opened.study.get_trials(deepcopy=False)
    several = len(ready.target.names) > 1
    summary = summarize(trials, ready.target.maximize[0])
    best = summary.best if not several else None
    states = Counter({"complete": 0, "pruned": 0, "failed": 0})
    for event in ledger.ended:
        states["failed" if event.state == TrialState.FAIL else event.state.name.lower()] += 1
    last = ledger.watch.lap("display")
    if ready.plan.workers == 1:  # the watch of the only worker is this one, and goes on after its search
        ledger.parts["display"] = ledger.parts.get("display", 0.0) + last
    seconds, added = ledger.watch.total, len(ledger.ended)
    return Outcome(
        study=run.study_name,
        storage=masked(ready.url),
        device=ready.plan.text,
        added=added,
        states=dict(states),
        seconds=seconds,
        trials_per_minute=60 * added / seconds,
        seconds_per_trial=sum(event.wall_time for event in ledger.ended) / added if added else None,
        parts={name: ledger.parts[name] for name in PARTS if ledger.parts.get(name)},
        complete=summary.complete,
        pruned=summary.pruned,
        failed=summary.failed,
        objectives=tuple(ready.target.labels),
        best=None if best is None else _trial(best),
        front=tuple(sorted(t.number for t in opened.study.best_trials)) if several and summary.complete else (),
        weights=_weights(best),
        left=None if total is None else max(0, total - summary.done),
        commands=_commands(ready, run),
    )


def as_json(outcome: Outcome) -> str:
    """One document, without NaN or infinity (they become text)."""
    return json.dumps(_strict(asdict(outcome)), indent=2)


def as_text(outcome: Outcome) -> Iterator[str]:
    """The result as a person reads it."""
    if outcome.added == 0 and outcome.left == 0:
        yield f"nothing left to do: the study holds {outcome.complete + outcome.pruned} complete or pruned trials"
    if outcome.best is not None:
        values, number = outcome.best["values"], outcome.best["number"]
        yield f"best {outcome.objectives[0]}: {readable(values[0])} (trial {number})"
        for name, value in outcome.best["params"].items():
            yield f"  {name} = {clean(value)}"
        measured = {k: v for k, v in outcome.best["attributes"].items() if k.startswith("validation_")}
        yield f"  measured at epoch {outcome.best['attributes'].get('best_epoch', '?')}: {listed(measured)}"
    if outcome.front:
        yield f"Pareto front of {' and '.join(outcome.objectives)}: trials {', '.join(map(str, outcome.front))}"
    if outcome.weights is not None:
        yield f"weights: {outcome.weights}"
    yield ""
    states = ", ".join(f"{count} {state}" for state, count in outcome.states.items() if count)
    yield f"{outcome.added} trials in {duration(outcome.seconds)}{f': {states}' if states else ''}"
    if outcome.added:
        assert outcome.seconds_per_trial is not None
        pace, taken = f"{outcome.trials_per_minute:.1f} trials per minute", duration(outcome.seconds_per_trial)
        yield f"{pace}; from its start to its end a trial takes {taken}"
        yield from _time_lines(outcome.parts)
    yield ""
    for name, command in outcome.commands.items():
        yield f"{name + ':':8} {command}"


def _time_lines(parts: Mapping[str, float]) -> Iterator[str]:
    whole = sum(parts.values())
    yield "where the time went:"
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * whole:
            yield f"  {PARTS[name]:28} {duration(seconds):>12}  {100 * seconds / whole:5.1f} %"


def _trial(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "values": list(trial.values),
        "params": dict(trial.params),
        "attributes": dict(trial.user_attrs),
    }


def _weights(best: FrozenTrial | None) -> str | None:
    path = None if best is None else best.user_attrs.get("weights")
    return path if isinstance(path, str) and Path(path).is_file() else None


def _commands(ready: Prepared, run: Assignment) -> dict[str, str]:
    """The exact commands to browse, resume and report."""
    where = f"--storage {shlex.quote(str(sqlite_path(ready.url) or masked(ready.url)))}"
    study = f"--study {shlex.quote(run.source)}"
    name = f" --study-name {shlex.quote(run.study_name)}"
    again = name if run.study_name != ready.loaded.spec.name else ""
    if run.target != target_of(ready.loaded.spec):
        pairs = zip(run.target.names, run.target.maximize, strict=True)
        again += " --objectives " + " ".join(f"{n}:{'maximize' if up else 'minimize'}" for n, up in pairs)
    return {
        "browse": f"{_python()} -m tuner.dashboard {where}",
        "resume": f"{_python()} -m tuner.run {study} {where}{again}",
        "report": f"{_python()} -m tuner.report {where}{name}",
    }


def _python() -> str:
    """What to type for this Python: its path, where `python` is another one."""
    found = shutil.which("python")
    return "python" if found is not None and Path(found) == Path(sys.executable) else shlex.quote(sys.executable)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
