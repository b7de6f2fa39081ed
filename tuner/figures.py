"""The results of a study as one value, of any Optuna study, ours or not; reports are ways to write it down."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tuner.results import REASON, TIME_PARTS, summarize


@dataclass(frozen=True)
class Row:
    """A complete trial; `seconds` is its wall time, None for a trial that did not store it and has no end."""

    number: int
    values: tuple[float, ...]
    seconds: float | None
    params: Mapping[str, Any]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """A study in numbers. Times in seconds; `parts` are sums over the `timed_trials`, which have a `wall_time`."""

    study: str
    storage: str
    metrics: tuple[str, ...]
    directions: tuple[str, ...]
    counts: Mapping[str, int]
    best: Row | None
    front: tuple[Row, ...]
    top: tuple[Row, ...]
    first_start: str | None
    last_end: str | None
    span_seconds: float | None
    busy_seconds: float
    trials_per_minute: float | None
    timed_trials: int
    wall_time: float
    device_seconds: float
    parts: Mapping[str, float]
    failures: Mapping[str, int]


def measure(study: Study, storage: str, top: int) -> Report:
    """Read all of `study` once. `storage` is its name for people; `top` how many of the best trials to keep."""
    trials = study.get_trials(deepcopy=False)
    signs = tuple(-1.0 if d == StudyDirection.MAXIMIZE else 1.0 for d in study.directions)
    single = len(signs) == 1
    default = ("value",) if single else tuple(f"value {i}" for i in range(len(signs)))
    summary = summarize(trials, maximize=signs[0] < 0)
    finite = [t for t in trials if t.state == TrialState.COMPLETE and all(map(math.isfinite, t.values))]
    ranked = sorted(finite, key=lambda t: [s * v for s, v in zip(signs, t.values, strict=True)])
    front = [] if single else sorted(_front(ranked, signs), key=lambda t: t.number)
    timed = [t for t in trials if _seconds(t, "wall_time") is not None]
    spans = sorted((t.datetime_start, t.datetime_complete) for t in trials if t.datetime_start and t.datetime_complete)
    last = max((end for _, end in spans), default=None)
    span = (last - spans[0][0]).total_seconds() if last else None
    failed = [t for t in trials if t.state == TrialState.FAIL]
    return Report(
        study=study.study_name,
        storage=storage,
        metrics=tuple(study.metric_names or default),
        directions=tuple(d.name.lower() for d in study.directions),
        counts={k: getattr(summary, k) for k in ("complete", "pruned", "failed", "running", "waiting")},
        best=_row(summary.best) if summary.best is not None else None,
        front=tuple(map(_row, front)),
        top=tuple(map(_row, ranked[:top])) if single else (),
        first_start=spans[0][0].isoformat() if spans else None,
        last_end=last.isoformat() if last else None,
        span_seconds=span,
        busy_seconds=_busy([(start.timestamp(), end.timestamp()) for start, end in spans]),
        trials_per_minute=len(spans) * 60 / span if span else None,
        timed_trials=len(timed),
        wall_time=math.fsum(_seconds(t, "wall_time") or 0.0 for t in timed),
        device_seconds=math.fsum(_seconds(t, "device_seconds") or 0.0 for t in timed),
        parts={part: math.fsum(_seconds(t, part) or 0.0 for t in timed) for part in TIME_PARTS},
        failures=dict(Counter(str(t.user_attrs.get(REASON, "no reason stored")) for t in failed).most_common()),
    )


def _seconds(trial: FrozenTrial, name: str) -> float | None:
    found = trial.user_attrs.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if math.isfinite(found) else None


def _row(trial: FrozenTrial) -> Row:
    seconds = _seconds(trial, "wall_time")
    if seconds is None and trial.duration is not None:
        seconds = trial.duration.total_seconds()
    return Row(trial.number, tuple(trial.values), seconds, trial.params, trial.user_attrs)


def _front(ranked: Sequence[FrozenTrial], signs: Sequence[float]) -> list[FrozenTrial]:
    """The trials that no other beats in every objective; `ranked` is in the order of their values."""
    front: list[tuple[list[float], FrozenTrial]] = []
    for trial in ranked:
        values = [s * v for s, v in zip(signs, trial.values, strict=True)]
        # What could dominate a trial comes before it in this order; equal values do not.
        if not any(all(map(float.__le__, kept, values)) and kept != values for kept, _ in front):
            front.append((values, trial))
    return [trial for _, trial in front]


def _busy(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one trial ran; `spans` in the order of their starts."""
    total, until = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def write_csv(study: Study, file: TextIO) -> None:
    """A row for each trial of any state, with the column names of Optuna's `Study.trials_dataframe`."""
    trials = study.get_trials(deepcopy=False)
    params = sorted({name for trial in trials for name in trial.params})
    attributes = sorted({name for trial in trials for name in trial.user_attrs})
    many = len(study.directions)
    metrics = study.metric_names or [str(i) for i in range(many)]
    values = ["value"] if many == 1 else [f"values_{metric}" for metric in metrics]
    times = ["datetime_start", "datetime_complete"]
    writer = csv.writer(file)
    heads = [*(f"params_{name}" for name in params), *(f"user_attrs_{name}" for name in attributes)]
    writer.writerow(["number", "state", *values, *times, *heads])
    for trial in trials:
        found: list[Any] = list(trial.values) if trial.values is not None else [None] * many
        found += [getattr(trial, name) and getattr(trial, name).isoformat() for name in times]
        found += [trial.params.get(name) for name in params] + [trial.user_attrs.get(name) for name in attributes]
        writer.writerow([trial.number, trial.state.name, *found])
