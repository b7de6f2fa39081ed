"""Tell the storage what becomes of a trial: its learning curve, its end, the best one's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from tuner import device
from tuner.clock import Stopwatch
from tuner.errors import TunerError
from tuner.results import REASON, Event, Finished, Notice, Record, is_better
from tuner.spec import StudySpec, one_line
from tuner.storage import Storage
from tuner.train import EpochResult, Task, Trainer
from tuner.weights import WeightsFolder

REPORT_SECONDS = 1.0
"""Without a pruner, a learning curve is written this often: a dashboard reads it no faster."""

BEST_SECONDS = 1.0
"""How old the best value of the study may be that says whether a running trial's weights are worth a copy."""


@dataclass
class Lane:
    """One trial in training; `weights` are those of its best epoch, if it may become the best trial.

    `lanes` is the widest stack that it was trained in.
    """

    trial: optuna.Trial
    record: Record
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None
    unwritten: dict[int, float] = field(default_factory=dict)
    written: float = 0.0
    lanes: int = 1


@dataclass(frozen=True)
class Failure:
    """Why a trial's training raised, without the traceback that would keep its tensors alive."""

    reason: str
    device_lost: bool
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, TunerError):
            return cls(str(error), False, False)
        memory, reason = device.is_out_of_memory(error), one_line(error)
        return cls(f"out of memory: {reason}" if memory else reason, device.is_lost(error), memory)


@dataclass
class Teller:
    """Writes one worker's results; `storage` is the study's, without Optuna's cache."""

    study: optuna.Study
    storage: Storage
    spec: StudySpec
    task: Task
    watch: Stopwatch
    worker: str
    weights: WeightsFolder | None = None
    _best: float | None = None
    _best_read: float = float("-inf")

    def decide(self, lane: Lane, result: EpochResult, trainer: Trainer, lanes: int) -> Event | None:
        """Take in an epoch, and end the trial if it was its last, if it diverged, or if the pruner says so."""
        record = lane.record
        lane.lanes = max(lane.lanes, lanes)
        if record.add(result, lanes) and self._may_win(record):
            lane.weights = trainer.weights(result.number)
        if record.trouble:
            # Pruned, not failed: a sampler learns from pruned trials, and must not propose this again and again.
            return self.end(lane, TrialState.PRUNED, (), record.trouble)
        if len(record.target.names) == 1:  # Optuna keeps no learning curves where there are several objectives.
            lane.unwritten[result.epoch] = result.validation[record.measure]
        if record.epochs == self.task.epochs:
            return self.end(lane, TrialState.COMPLETE, (), "")
        return self._report(lane, result.validation[record.measure]) if lane.unwritten else None

    def _report(self, lane: Lane, value: float) -> Event | None:
        """Write the learning curve so far, if someone reads it now, and ask the pruner."""
        pruner = not isinstance(self.study.pruner, optuna.pruners.NopPruner)
        if not pruner and self.watch.now() - lane.written < REPORT_SECONDS:
            return None
        lane.written = self.watch.now()
        try:
            self.storage.record(lane.trial._trial_id, reports=lane.unwritten)
        except UpdateFinishedTrialError:
            return self._lose(lane)
        # `Trial.should_prune` looks at what the trial itself remembers of its reports, and not into the storage.
        lane.trial._cached_frozen_trial.intermediate_values.update(lane.unwritten)
        lane.unwritten.clear()
        if pruner and lane.trial.should_prune():
            return self.end(lane, TrialState.PRUNED, (value,), f"pruned at epoch {lane.record.epochs - 1}")
        return None

    def end(self, lane: Lane, state: TrialState, values: tuple[float, ...], reason: str) -> Finished | Notice:
        """End a trial in the storage: all that is known of it and its state, in one transaction."""
        number, record = lane.trial.number, lane.record
        attributes = record.attributes(self.watch.now(), device.peak_megabytes(self.task.device))
        attributes |= {"device": device.describe(self.task.device), "lanes": lane.lanes, "seed": self.spec.seed}
        attributes |= {REASON: reason} if reason else {}
        if state == TrialState.COMPLETE:
            values = record.values(attributes)
            if self.weights is not None and lane.weights is not None and self._may_win(record, now=True):
                attributes["weights"] = str(self.weights.save(number, lane.weights, lane.hyperparameters))
        try:
            frozen = lane.trial._cached_frozen_trial
            self.study.sampler.after_trial(self.study, frozen, state, list(values) or None)
            self.storage.record(
                lane.trial._trial_id, attributes=attributes, reports=lane.unwritten, state=state, values=values
            )
        except UpdateFinishedTrialError:
            return self._lose(lane)
        if "weights" in attributes and self.weights is not None:
            self._keep_best_weights(self.weights)
        params, wall = lane.trial.params, attributes["wall_time"]
        return Finished(number, state, values, params, wall, record.epochs, self.worker, reason)

    def _lose(self, lane: Lane) -> Notice:
        """Somebody else ended the trial: it is dropped here."""
        state = self.storage.get_trial(lane.trial._trial_id).state.name.lower()
        return Notice(f"trial {lane.trial.number} was ended by another process ({state}); it is dropped here")

    def _may_win(self, record: Record, now: bool = False) -> bool:
        """Whether the trial's best epoch is better than every complete trial's, `now` or a moment ago."""
        if record.best is None or len(record.target.names) > 1:
            return False
        if now or self.watch.now() - self._best_read > BEST_SECONDS:
            self._best_read = self.watch.now()
            try:
                self._best = self.storage.get_best_trial(self.study._study_id).value
            except ValueError:
                self._best = None
        return is_better(record.best.validation[record.measure], self._best, record.target.maximize[0])

    def _keep_best_weights(self, weights: WeightsFolder) -> None:
        trials = self.study.get_trials(deepcopy=False)
        best = self.storage.get_best_trial(self.study._study_id).number
        weights.remove_others(best, {t.number for t in trials if t.state.is_finished()})
