"""The tuning loop: ask for trials, train them by epochs, report, prune, tell. A generator of what happens.

The trainers train and know nothing of Optuna; here it is decided what their numbers mean. A lone trial is a stack of
one lane, so that one loop serves both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from tuner import device
from tuner.clock import Stopwatch
from tuner.errors import BudgetSpentError, DeviceError, Interrupted, TooManyFailuresError, TunerError
from tuner.interrupt import Interrupt
from tuner.owner import is_gone
from tuner.results import REASON, WORKER, EpochDone, Event, Finished, Notice, Record, Spent, Started, Target, is_better
from tuner.spec import StudySpec, one_line
from tuner.storage import Storage
from tuner.train import EpochResult, Lone, Task, Trainer
from tuner.weights import WeightsFolder

FAILURES_IN_A_ROW = 10
"""So many trials that raise, one after the other, are not bad luck: the run stops and says why."""

REPORT_SECONDS = 1.0
"""Without a pruner, a learning curve is written this often: a dashboard reads it no faster."""

POLL_SECONDS = 0.2
"""How often to look whether the trials that others are training have left room for another one."""


class Budget(Protocol):
    """How many trials may still start; shared by the workers of one command."""

    def take(self) -> bool:
        """Take one, if there is one left and time for it."""

    def give_back(self) -> None:
        """Return one that was not used."""


@dataclass
class Lane:
    """One trial in training; `weights` are those of its best epoch, if it may become the best trial."""

    trial: optuna.Trial
    record: Record
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None
    unwritten: dict[int, float] = field(default_factory=dict)
    written: float = 0.0


@dataclass
class Search:
    """One worker's part of a search.

    `storage` is the study's, without Optuna's cache; `weights` is where the best trial's weights are kept, if anywhere.
    """

    study: optuna.Study
    storage: Storage
    spec: StudySpec
    task: Task
    target: Target
    budget: Budget
    watch: Stopwatch
    interrupt: Interrupt
    worker: str
    weights: WeightsFolder | None = None
    width: int = 1
    _lanes: dict[int, Lane] = field(default_factory=dict)
    _trainers: list[Trainer] = field(default_factory=list)
    _refused: bool = False
    _failures: int = 0
    _finished: int = 0

    def events(self) -> Iterator[Event]:
        """Run until the budget is spent. Whatever ends it, the trials in training are ended with a reason first.

        Raises `Interrupted`, `TooManyFailuresError`, and `DeviceError` where the device is lost.
        """
        try:
            yield from self._loop()
        except BaseException as error:
            why = str(error) if isinstance(error, Interrupted) else one_line(error)
            ended = [self._end(lane, TrialState.FAIL, (), f"interrupted: {why}") for lane in list(self._lanes.values())]
            if not isinstance(error, GeneratorExit):
                yield from ended
                yield Spent(self.worker, dict(self.watch.totals), self._finished)
            raise
        yield Spent(self.worker, dict(self.watch.totals), self._finished)

    def _loop(self) -> Iterator[Event]:
        waited = False
        while True:
            self.interrupt.check()
            yield from self._fill()
            if not self._lanes:
                if not self._refused or not self._may_get_room():
                    return
                if not waited:
                    yield Notice("waiting for trials that others train: each one that fails leaves room for one here")
                waited = True
                time.sleep(POLL_SECONDS)
                self.watch.lap("wait")
            for trainer in list(self._trainers):
                yield from self._round(trainer)

    def _fill(self) -> Iterator[Event]:
        """Give each free lane a trial, while the budget lasts."""
        self._refused = False
        while len(self._lanes) < self.width and self.budget.take():
            try:
                lane = self._ask()
            except BudgetSpentError:
                self.budget.give_back()
                self._refused = True
                return
            failure = self._start(lane)
            yield Started(lane.trial.number, lane.trial.params, self.worker)
            self.watch.lap("display")
            if failure is not None:
                yield from self._fail([lane], failure)

    def _ask(self) -> Lane:
        started, stored = self.watch.now(), self.storage.seconds
        trial = self.study.ask()
        lane = Lane(trial, Record(trial.number, self.target, started))
        self._lanes[trial.number] = lane
        self._lap("sampler", stored)
        return lane

    def _start(self, lane: Lane) -> Failure | None:
        """Sample the hyperparameters and build what trains them; what a study file's code raises is returned."""
        stored = self.storage.seconds
        try:
            lane.hyperparameters = self.spec.space(lane.trial)
            self._lap("sampler", stored)
            device.reset_peak(self.task.device)
            with self.interrupt.interruptible():
                trainer = Lone(self.spec.job(lane.trial.number, lane.hyperparameters), self.task)
                device.synchronize(self.task.device)
            lane.record.build_seconds = self.watch.lap("build")
        except Exception as error:
            return Failure.of(error)
        self._trainers.append(trainer)
        return None

    def _round(self, trainer: Trainer) -> Iterator[Event]:
        """Train the lanes of one trainer for an epoch, and decide which of them go on."""
        lanes = [self._lanes[number] for number in trainer.numbers]
        failure = None
        results: Sequence[EpochResult] = ()
        try:
            with self.interrupt.interruptible():
                results = trainer.epoch(self.watch)
        except Exception as error:
            failure = Failure.of(error)
        if failure is not None:
            # Outside the except block, whose traceback keeps the tensors of the failed epoch alive.
            self._trainers.remove(trainer)
            del trainer
            yield from self._fail(lanes, failure)
            return
        for result in results:
            lane = self._lanes[result.number]
            finished = self._decide(lane, result, trainer, len(results))
            if finished is not None:
                trainer.leave([result.number])
                yield finished
            else:
                value = result.validation[lane.record.measure]
                yield EpochDone(result.number, result.epoch, self.task.epochs, value)
            self.watch.lap("display")
        if not trainer.numbers:
            self._trainers.remove(trainer)

    def _decide(self, lane: Lane, result: EpochResult, trainer: Trainer, lanes: int) -> Event | None:
        """Report an epoch, and end the trial if it was its last, if it diverged, or if the pruner says so."""
        record, stored = lane.record, self.storage.seconds
        if record.add(result, lanes) and self._may_win(record):
            lane.weights = trainer.weights(result.number)
        if record.trouble:
            # Pruned, not failed: a sampler learns from pruned trials, and must not propose this again and again.
            event: Event | None = self._end(lane, TrialState.PRUNED, (), record.trouble)
        else:
            value = result.validation[record.measure]
            lane.unwritten[result.epoch] = value
            if record.epochs == self.task.epochs:
                event = self._end(lane, TrialState.COMPLETE, (), "")
            else:
                event = self._report(lane, value)
        self._lap("pruner", stored)
        return event

    def _report(self, lane: Lane, value: float) -> Event | None:
        """Write the learning curve so far, if someone reads it now, and ask the pruner."""
        if len(self.target.names) > 1:
            lane.unwritten.clear()  # Optuna keeps no learning curves where there are several objectives.
            return None
        pruner = not isinstance(self.study.pruner, optuna.pruners.NopPruner)
        if not pruner and self.watch.now() - lane.written < REPORT_SECONDS:
            return None
        lane.written = self.watch.now()
        try:
            self.storage.record(lane.trial._trial_id, reports=lane.unwritten)
        except UpdateFinishedTrialError:
            return self._lose(lane)
        lane.unwritten.clear()
        if pruner and lane.trial.should_prune():
            return self._end(lane, TrialState.PRUNED, (value,), f"pruned at epoch {lane.record.epochs - 1}")
        return None

    def _end(self, lane: Lane, state: TrialState, values: tuple[float, ...], reason: str) -> Event:
        """End a trial in the storage: all that is known of it and its state, in one transaction."""
        number, record = lane.trial.number, lane.record
        del self._lanes[number]
        attributes = record.attributes(self.watch.now(), device.peak_megabytes(self.task.device))
        attributes |= {"device": device.describe(self.task.device), "lanes": self.width, "seed": self.spec.seed}
        attributes |= {REASON: reason} if reason else {}
        if state == TrialState.COMPLETE:
            values = record.values(attributes)
            if self.weights is not None and lane.weights is not None and self._may_win(record):
                attributes["weights"] = str(self.weights.save(number, lane.weights, lane.hyperparameters))
        try:
            frozen = self.storage.get_trial(lane.trial._trial_id)
            self.study.sampler.after_trial(self.study, frozen, state, list(values) or None)
            self.storage.record(
                lane.trial._trial_id, attributes=attributes, reports=lane.unwritten, state=state, values=values
            )
        except UpdateFinishedTrialError:
            return self._lose(lane)
        if "weights" in attributes and self.weights is not None:
            self._keep_best_weights(self.weights)
        self._finished += 1
        self._failures = self._failures + 1 if state == TrialState.FAIL else 0
        params, wall = lane.trial.params, attributes["wall_time"]
        return Finished(number, state, values, params, wall, record.epochs, self.worker, reason)

    def _fail(self, lanes: Sequence[Lane], failure: Failure) -> Iterator[Event]:
        """End trials whose training raised; the run goes on unless that is pointless."""
        device.release(self.task.device)
        for lane in lanes:
            yield self._end(lane, TrialState.FAIL, (), failure.reason)
        self.watch.lap("storage")
        if failure.device_lost:
            raise DeviceError(f"{self.task.device} is lost to this process ({failure.reason}); start again to resume")
        if self._failures >= FAILURES_IN_A_ROW:
            raise TooManyFailuresError(f"{self._failures} trials failed in a row, the last one with: {failure.reason}")

    def _lose(self, lane: Lane) -> Notice:
        """Somebody else ended the trial: drop it."""
        self._lanes.pop(lane.trial.number, None)
        state = self.storage.get_trial(lane.trial._trial_id).state.name.lower()
        return Notice(f"trial {lane.trial.number} was ended by another process ({state}); it is dropped here")

    def _may_win(self, record: Record) -> bool:
        """Whether the trial's best epoch is better than every complete trial's."""
        if record.best is None or len(self.target.names) > 1:
            return False
        try:
            best = self.storage.get_best_trial(self.study._study_id).value
        except ValueError:
            best = None
        return is_better(record.best.validation[record.measure], best, self.target.maximize[0])

    def _keep_best_weights(self, weights: WeightsFolder) -> None:
        trials = self.study.get_trials(deepcopy=False)
        best = self.storage.get_best_trial(self.study._study_id).number
        weights.remove_others(best, {t.number for t in trials if t.state.is_finished()})

    def _may_get_room(self) -> bool:
        """Whether a trial may yet start within the study's total; trials whose process is gone are ended first."""
        limit, study_id = self.storage.total_limit, self.study._study_id
        if limit is None:
            return False
        for owner in {t.user_attrs.get(WORKER, "") for t in self.study.get_trials(states=(TrialState.RUNNING,))}:
            if is_gone(owner):
                self.storage.fail_trials_of(study_id, owner, "its process is gone")
        return self.storage.finished_count(study_id)[0] < limit

    def _lap(self, part: str, stored: float) -> None:
        """Give the seconds since the last lap to `part`, but those that the storage took to ``storage``."""
        self.watch.lap(part)
        self.watch.move(self.storage.seconds - stored, part, "storage")


@dataclass(frozen=True)
class Failure:
    """Why a trial's training raised, without the traceback that would keep its tensors alive."""

    reason: str
    device_lost: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, TunerError):
            return cls(str(error), False)
        reason = one_line(error)
        return cls(f"out of memory: {reason}" if device.is_out_of_memory(error) else reason, device.is_lost(error))
