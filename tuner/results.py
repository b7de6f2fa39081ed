"""What a trial did, as it is stored and as it is told: the names of the stored attributes, and the events of a run.

Everything that shows results (display, report, dashboard, best) reads these names and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from tuner.train import EpochResult

TIME_PARTS = ("build_seconds", "train_seconds", "validate_seconds", "wait_seconds")
"""Attributes of a trial, in seconds, that add up to its `wall_time`."""

NUMBERS = (
    "wall_time",
    "device_seconds",
    *TIME_PARTS,
    "samples_per_second",
    "epochs",
    "peak_memory_mb",
)
"""Attributes of a trial that are numbers, besides its metrics."""

WORKER = "worker"
"""The user attribute that names a trial's owner."""

LABELS = ("device", "lanes", WORKER, "seed")
"""Attributes of a trial that say where and how it ran."""

REASON = "reason"
"""Why a trial failed, was pruned, or is not to be trusted: one line."""


@dataclass(frozen=True)
class Target:
    """What a study optimizes: the names of its objectives (``loss``, a metric, a time), and which are maximized."""

    names: tuple[str, ...]
    maximize: tuple[bool, ...]

    @property
    def has_curve(self) -> bool:
        """Whether every epoch of a trial has a value of what is optimized: one objective, and no time or size."""
        return len(self.names) == 1 and self.names[0] not in NUMBERS

    @property
    def labels(self) -> list[str]:
        """The objectives as a person reads them."""
        return [name if name in NUMBERS else f"validation {name}" for name in self.names]


@dataclass
class Record:
    """What one trial has done so far, and in the end its values and attributes.

    A trial's value is its best validation loss (or metric) over its epochs; `started` is its mark on the stopwatch.
    """

    number: int
    target: Target
    started: float
    build_seconds: float = 0.0
    train_seconds: float = 0.0
    validate_seconds: float = 0.0
    device_seconds: float = 0.0
    samples: int = 0
    epochs: int = 0
    best: EpochResult | None = None
    last: EpochResult | None = None

    def add(self, result: EpochResult, lanes: int) -> bool:
        """Take in an epoch that was trained in a stack of `lanes`; returns whether it is the best so far."""
        self.last = result
        self.epochs += 1
        self.samples += result.samples
        self.train_seconds += result.train_seconds
        self.validate_seconds += result.validate_seconds
        self.device_seconds += (result.train_seconds + result.validate_seconds) / lanes
        name, maximize = self.measure, self.target.maximize[0]
        than = None if self.best is None else self.best.validation[name]
        if not is_better(result.validation[name], than, maximize):
            return False
        self.best = result
        return True

    @property
    def measure(self) -> str:
        """The objective that names the best epoch: the first one, or the loss where that is a time."""
        return self.target.names[0] if self.target.names[0] not in NUMBERS else "loss"

    @property
    def trouble(self) -> str:
        """Why the last epoch's numbers end the trial; empty if they do not."""
        if self.last is None:
            return ""
        measured = {"training loss": self.last.train_loss}
        measured |= {name: self.last.validation[name] for name in ("loss", self.measure)}
        for name, value in measured.items():
            if not math.isfinite(value):
                return f"{name} is {value} at epoch {self.last.epoch}"
        return ""

    def values(self, attributes: Mapping[str, Any]) -> tuple[float, ...]:
        """The trial's values, one for each objective."""
        assert self.best is not None
        measured = {**self.best.validation, **{name: attributes[name] for name in NUMBERS}}
        return tuple(float(measured[name]) for name in self.target.names)

    def attributes(self, now: float, peak_memory_mb: float) -> dict[str, Any]:
        """What is stored of the trial; `now` is read from the clock that gave `started`. Parts add up to the whole."""
        wall = now - self.started
        parts = (self.build_seconds, self.train_seconds, self.validate_seconds)
        attributes: dict[str, Any] = {
            "wall_time": wall,
            "device_seconds": self.device_seconds,
            **dict(zip(TIME_PARTS, (*parts, wall - sum(parts)), strict=True)),
            "samples_per_second": self.samples / self.train_seconds if self.train_seconds else 0.0,
            "epochs": self.epochs,
            "peak_memory_mb": peak_memory_mb,
        }
        if self.best is not None:
            attributes |= {"best_epoch": self.best.epoch, "train_loss": self.best.train_loss}
            for name, value in self.best.validation.items():
                # A page cannot read NaN as JSON.
                attributes[f"validation_{name}"] = value if math.isfinite(value) else str(value)
        return attributes


@dataclass(frozen=True)
class Started:
    """A trial was created and its hyperparameters were sampled."""

    number: int
    params: Mapping[str, Any]
    worker: str


@dataclass(frozen=True)
class EpochDone:
    """A running trial finished an epoch (0-based) and reported `value`."""

    number: int
    epoch: int
    epochs: int
    value: float


@dataclass(frozen=True)
class Finished:
    """A trial ended and its end is in the storage.

    `values` is empty unless it is complete; `wall_time` in seconds; `reason` says why it failed or was pruned.
    """

    number: int
    state: TrialState
    values: tuple[float, ...]
    params: Mapping[str, Any]
    wall_time: float
    epochs: int
    worker: str
    reason: str = ""


@dataclass(frozen=True)
class Notice:
    """One line for the user that is about no single trial (what was chosen, what runs differently and why)."""

    text: str


@dataclass(frozen=True)
class Spent:
    """Where a worker's seconds went, by part, sent when it ends; `trials` is how many it finished."""

    worker: str
    parts: Mapping[str, float]
    trials: int


Event = Started | EpochDone | Finished | Notice | Spent


@dataclass(frozen=True)
class Summary:
    """A study in numbers, at one moment."""

    complete: int = 0
    pruned: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    best: FrozenTrial | None = field(default=None, compare=False)

    @property
    def done(self) -> int:
        """Trials that count towards `--total-trials`."""
        return self.complete + self.pruned


def summarize(trials: list[FrozenTrial], maximize: bool = False) -> Summary:
    """Count trials by state and find the best complete one of a study with one objective (finite values only)."""
    count = dict.fromkeys(TrialState, 0)
    best: FrozenTrial | None = None
    for trial in trials:
        count[trial.state] += 1
        if trial.state != TrialState.COMPLETE or trial.values is None or len(trial.values) != 1:
            continue
        if math.isfinite(trial.values[0]) and (best is None or is_better(trial.values[0], best.values[0], maximize)):
            best = trial
    return Summary(
        complete=count[TrialState.COMPLETE],
        pruned=count[TrialState.PRUNED],
        failed=count[TrialState.FAIL],
        running=count[TrialState.RUNNING],
        waiting=count[TrialState.WAITING],
        best=best,
    )


def is_better(value: float, than: float | None, maximize: bool) -> bool:
    """Whether `value` is finite and better than the finite or missing value `than`."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    return value > than if maximize else value < than
