"""Tell the storage what becomes of a trial: its learning curve, its end, the best one's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import TrialState

from tuner import device
from tuner.clock import Stopwatch
from tuner.errors import TunerError
from tuner.halving import Cohort, Halving
from tuner.results import REASON, Event, Finished, Notice, Record, Target, is_better
from tuner.spec import StudySpec, one_line
from tuner.storage import Storage
from tuner.storage_rows import Write
from tuner.train import EpochResult, Task, Trainer
from tuner.weights import WeightsFolder

REPORT_SECONDS = 1.0
"""Without a pruner, a learning curve is written this often: a dashboard reads it no faster."""

BEST_SECONDS = 1.0
"""How old the best value of the study may be that says whether a running trial's weights are worth a copy."""

COMPARES_RUNNING = optuna.pruners.HyperbandPruner
"""The pruner that looks at the trials in training, besides those that are complete."""


@dataclass
class Lane:
    """One trial in training; `weights` are those of its best epoch, if it may become the best trial.

    `lanes` is the widest stack that it was trained in; `micro_batch` is how many examples at a time it was last tried
    with, if it did not fit the memory.
    """

    trial: optuna.Trial
    record: Record
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None
    unwritten: dict[int, float] = field(default_factory=dict)
    written: float = 0.0
    lanes: int = 1
    micro_batch: int | None = None
    cohort: Cohort = field(default_factory=Cohort)

    @property
    def at_rung(self) -> bool:
        """Whether it waits for the others of its cohort, to be compared with them."""
        return self.record.epochs == self.cohort.rung

    @property
    def in_parts(self) -> str:
        """How it is trained, where it did not fit the memory: a line for the user."""
        batch_size, at_once = self.hyperparameters["batch_size"], f"{self.micro_batch} examples at a time"
        parts = self.micro_batch is not None and self.micro_batch < batch_size
        how = f"trained and evaluated {at_once} (its batches stay {batch_size})" if parts else f"evaluated {at_once}"
        return f"trial {self.trial.number} did not fit the memory; it is {how}"

    @property
    def value(self) -> float:
        """What the last epoch reported."""
        assert self.record.last is not None
        return self.record.last.validation[self.record.measure]

    @property
    def id(self) -> int:
        """The trial's number in the storage, over all studies."""
        return self.trial._trial_id


@dataclass(frozen=True)
class Trained:
    """An epoch of one lane, of the `lanes` of its trainer."""

    lane: Lane
    result: EpochResult
    trainer: Trainer
    lanes: int


@dataclass(frozen=True)
class Ending:
    """How a trial ends; a complete one's values follow from its record."""

    lane: Lane
    state: TrialState
    reason: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a trial's training raised, without the traceback that would keep its tensors alive."""

    reason: str
    device_lost: bool
    out_of_memory: bool
    pruned: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, TunerError):
            return cls(str(error), False, False)
        if isinstance(error, optuna.TrialPruned):
            return cls(f"by the study file: {error}".rstrip(": "), False, False, pruned=True)
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

    def take(self, trained: Sequence[Trained]) -> list[Event | None]:
        """Take in a round of epochs; gives the event that ended each trial, or None for those that go on.

        All that is reported is one transaction, and all trials that end are another one.
        """
        decided: list[Ending | None] = [self._decide(epoch) for epoch in trained]
        reporting = [i for i, epoch in enumerate(trained) if decided[i] is None and self._is_to_report(epoch.lane)]
        lost = self.storage.record_all(
            [Write(trained[i].lane.id, reports=trained[i].lane.unwritten) for i in reporting]
        )
        for i in reporting:
            lane = trained[i].lane
            # `Trial.should_prune` looks at what the trial itself remembers of its reports, and not into the storage.
            lane.trial._cached_frozen_trial.intermediate_values.update(lane.unwritten)
            lane.unwritten.clear()
        events: list[Event | None] = [self._lost(e.lane) if e.lane.id in lost else None for e in trained]
        for i in self._pruned([i for i in reporting if events[i] is None], trained):
            lane, result = trained[i].lane, trained[i].result
            value = result.validation[lane.record.measure]
            decided[i] = Ending(lane, TrialState.PRUNED, f"pruned at epoch {result.epoch}", (value,))
        ending = [i for i, one in enumerate(decided) if one is not None]
        for i, event in zip(ending, self.end([e for e in decided if e is not None]), strict=True):
            events[i] = event
        return events

    def _decide(self, trained: Trained) -> Ending | None:
        """Take in an epoch; a trial whose last one it was ends, and so does one that has diverged."""
        lane, record = trained.lane, trained.lane.record
        lane.lanes = max(lane.lanes, trained.lanes)
        if record.add(trained.result, trained.lanes) and self._may_win(record):
            lane.weights = trained.trainer.weights(trained.result.number)
        if record.trouble:
            lane.cohort.diverged += 1
            # Pruned, not failed: a sampler learns from pruned trials, and must not propose this again and again.
            return Ending(lane, TrialState.PRUNED, record.trouble)
        if record.target.has_curve:
            lane.unwritten[trained.result.epoch] = trained.result.validation[record.measure]
        return Ending(lane, TrialState.COMPLETE, "") if record.epochs == self.task.epochs else None

    def _is_to_report(self, lane: Lane) -> bool:
        """Whether someone reads the learning curve now."""
        now = self.watch.now()
        if not lane.unwritten or (not self._prunes and now - lane.written < REPORT_SECONDS):
            return False
        lane.written = now
        return True

    @property
    def _prunes(self) -> bool:
        return not isinstance(self.study.pruner, optuna.pruners.NopPruner)

    def _pruned(self, candidates: Sequence[int], trained: Sequence[Trained]) -> list[int]:
        """Which of the candidates the pruner ends; halving waits for a whole cohort (`losers`)."""
        if not self._prunes or isinstance(self.study.pruner, Halving):
            return []
        pruned = []
        compares_running = isinstance(self.study.pruner, COMPARES_RUNNING)
        try:
            for at, i in enumerate(candidates):
                # Only such pruners look at running trials: for the others one reading a round is enough, if any.
                self.storage.reading_paused = not compares_running and (at > 0 or not self.storage.is_news())
                if trained[i].lane.trial.should_prune():
                    pruned.append(i)
        finally:
            self.storage.reading_paused = False
        return pruned

    def cohort(self, target: Target) -> Cohort:
        """A new cohort, which is compared at the pruner's rungs if every epoch has a value."""
        pruner = self.study.pruner
        return Cohort(pruner.rungs if isinstance(pruner, Halving) and target.has_curve else ())

    def losers(self, lanes: Iterable[Lane]) -> list[Ending]:
        """How the trials end that lose at a rung, of each cohort whose trials have all reached it."""
        cohorts: dict[Cohort, list[Lane]] = {}
        for lane in lanes:
            cohorts.setdefault(lane.cohort, []).append(lane)
        endings = []
        for cohort, members in cohorts.items():
            if not all(lane.at_rung for lane in members):
                continue
            values = {lane.trial.number: lane.value for lane in members}
            why = cohort.losers(values, members[0].record.target.maximize[0])
            if why is None:
                why = {lane.trial.number: "" for lane in members if lane.trial.should_prune()}
            for lane in members:
                if lane.trial.number in why:
                    text = f"pruned at epoch {lane.record.epochs - 1}: {why[lane.trial.number]}".rstrip(": ")
                    endings.append(Ending(lane, TrialState.PRUNED, text, (lane.value,)))
        return endings

    def end(self, endings: Sequence[Ending]) -> list[Finished | Notice]:
        """End trials in the storage: all that is known of them and their states, in one transaction."""
        writes = [self._last_words(ending) for ending in endings]
        lost = self.storage.record_all(writes)
        if self.weights is not None and any("weights" in write.attributes for write in writes):
            self._keep_best_weights(self.weights)
        events: list[Finished | Notice] = []
        for ending, write in zip(endings, writes, strict=True):
            if write.trial_id in lost:
                events.append(self._lost(ending.lane))
                continue
            trial, record = ending.lane.trial, ending.lane.record
            values = tuple(write.values) if ending.state == TrialState.COMPLETE else ()
            seconds = write.attributes["wall_time"]
            events.append(
                Finished(
                    trial.number, ending.state, values, trial.params, seconds, record.epochs, self.worker, ending.reason
                )
            )
        return events

    def _last_words(self, ending: Ending) -> Write:
        """All that is stored of a trial at its end; the best one's weights are kept before it is told."""
        lane, record, values = ending.lane, ending.lane.record, ending.values
        attributes = record.attributes(self.watch.now(), device.peak_megabytes(self.task.device))
        attributes |= {"device": device.describe(self.task.device), "lanes": lane.lanes, "seed": self.spec.seed}
        attributes |= {REASON: ending.reason} if ending.reason else {}
        attributes |= {"micro_batch": lane.micro_batch} if lane.micro_batch else {}
        if ending.state == TrialState.COMPLETE:
            values = record.values(attributes)
            if self.weights is not None and lane.weights is not None and self._may_win(record, now=True):
                try:
                    path = self.weights.save(lane.trial.number, lane.weights, lane.hyperparameters)
                    attributes["weights"] = str(path)
                except TunerError as error:  # The trial is worth more than its file.
                    attributes["weights_lost"] = str(error)
                self._best = values[0]
        frozen = lane.trial._cached_frozen_trial
        self.study.sampler.after_trial(self.study, frozen, ending.state, list(values) or None)
        return Write(lane.id, attributes, lane.unwritten, ending.state, values)

    def _lost(self, lane: Lane) -> Notice:
        """Somebody else ended the trial: it is dropped here."""
        state = self.storage.get_trial(lane.trial._trial_id).state.name.lower()
        return Notice(f"trial {lane.trial.number} was ended by another process ({state}); it is dropped here")

    def _may_win(self, record: Record, now: bool = False) -> bool:
        """Whether the trial's best epoch is better than every complete trial's, `now` or a moment ago."""
        if record.best is None or not record.target.has_curve:
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
