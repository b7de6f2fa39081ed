"""A run's progress in numbers and words, from its events: no output, no clock of its own.

The words are those of every place that shows results, so that a value reads the same on the terminal and in a report.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import TrialState

from tuner.results import EpochDone, Finished, Started, Summary, is_better

STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colors and cursor movements of a terminal."""


def clean(text: object, limit: int = 200) -> str:
    """One line of at most `limit` printable characters: control characters and line breaks become spaces."""
    line = " ".join("".join(c if c.isprintable() else " " for c in ESCAPES.sub("", str(text))).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def readable(value: object, limit: int = 40) -> str:
    """A value rounded for reading: four significant digits for a float, everything else as it is, on one line."""
    return f"{value:.4g}" if isinstance(value, float) else clean(value, limit)


def duration(seconds: float) -> str:
    """Seconds as a person writes them: ``0.31 s``, ``12.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds) or seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


def listed(params: Mapping[str, Any]) -> str:
    """Hyperparameters on one line: ``lr=0.12 batch_size=32``."""
    return " ".join(f"{clean(name, 60)}={readable(value)}" for name, value in params.items())


def named(objective: str, values: Sequence[float]) -> str:
    """Values with their names; the names of several objectives are one text, parted by commas."""
    names = objective.split(", ")
    if len(names) == len(values):
        return ", ".join(f"{clean(name)} {readable(value)}" for name, value in zip(names, values, strict=True))
    return f"{clean(objective)} {', '.join(readable(value) for value in values)}"


def trial_line(event: Finished, objective: str, new_best: bool) -> str:
    """An ended trial on one line: its values or why it has none, its wall time, its hyperparameters."""
    if event.state == TrialState.COMPLETE:
        what = named(objective, event.values) + (" (new best)" if new_best else "")
    else:
        epochs = f"after {event.epochs} epoch{'s' * (event.epochs != 1)}" if event.epochs else ""
        told = event.reason.removeprefix("pruned ").strip()  # the line has said that it is
        what = clean(told) if told.startswith("at epoch") else ": ".join(part for part in (epochs, clean(told)) if part)
    parts = (f"trial {event.number} {STATES[event.state]}", what, duration(event.wall_time), listed(event.params))
    return "  ".join(part for part in parts if part)


@dataclass
class Tally:
    """A run in numbers: what was there at its start, and what its events have changed since."""

    objective: str
    maximize: bool
    goal: int | None
    start: Summary
    ended: Counter[TrialState] = field(default_factory=Counter)
    running: dict[int, EpochDone | None] = field(default_factory=dict)
    widest: int = 1
    first_start: float | None = None
    last_end: float = 0.0
    best: tuple[float, int, Mapping[str, Any]] | None = None
    latest: Finished | None = None
    failure: Finished | None = None

    def __post_init__(self) -> None:
        found = self.start.best
        if found is not None and found.values:
            self.best = (found.values[0], found.number, found.params)

    def started(self, event: Started, now: float) -> None:
        """Count a trial as running; the first one starts the clock."""
        if self.first_start is None:
            self.first_start = now
        self.running[event.number] = None
        self.widest = max(self.widest, len(self.running))

    def epoch_done(self, event: EpochDone) -> None:
        """Remember how far a running trial is."""
        if event.number in self.running:
            self.running[event.number] = event

    def finished(self, event: Finished, now: float) -> bool:
        """Count a trial as ended; True if it is the best of the study so far."""
        if self.first_start is None:
            self.first_start = now - event.wall_time
        self.running.pop(event.number, None)
        self.ended[event.state] += 1
        self.last_end = now
        if event.state == TrialState.FAIL:
            self.failure = event
        if event.state != TrialState.COMPLETE:
            return False
        self.latest = event
        than = None if self.best is None else self.best[0]
        if len(event.values) != 1 or not is_better(event.values[0], than, self.maximize):
            return False
        self.best = (event.values[0], event.number, event.params)
        return True

    @property
    def done(self) -> int:
        """Trials of this run that ended; never more than its goal."""
        count = self.ended.total()
        return count if self.goal is None else min(count, self.goal)

    def best_text(self) -> str:
        """The best value and its trial, or nothing while there is none."""
        if self.best is None:
            return ""
        value, number, params = self.best
        return clean(f"{named(self.objective, [value])} in trial {number}, {listed(params)}", 400)

    def pace(self, now: float) -> str:
        """Trials per minute and the time left; nothing before either is known."""
        count = self.ended.total()
        if self.first_start is None or count == 0 or now <= self.first_start:
            return ""
        text = f"{readable(count * 60 / (now - self.first_start))} trials per minute"
        left = self.seconds_left(now)
        return text if left is None else f"{text}, about {duration(left)} left"

    def seconds_left(self, now: float) -> float | None:
        """From the pace of the ended trials; None before as many ended as run side by side."""
        count = self.ended.total()
        if self.goal is None or self.first_start is None or count < max(2, self.widest) or count >= self.goal:
            return None
        # The pace is that of the last end: between two ends of long trials the estimate falls with the clock.
        each = (self.last_end - self.first_start) / count
        if now - self.last_end > 2 * each * self.widest:  # Something holds it up, and the wait is part of the pace.
            return (now - self.first_start) / count * (self.goal - count)
        return max(0.0, each * (self.goal - count) - (now - self.last_end))
