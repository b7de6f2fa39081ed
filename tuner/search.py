"""The tuning loop: ask for trials, train them by epochs, report, prune, tell. A generator of what happens.

The trainers train and know nothing of Optuna; here it is decided what their numbers mean. A lone trial is a stack of
one lane, so that one loop serves both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

import optuna
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import TrialState

from tuner import device
from tuner.assemble import Assembler
from tuner.errors import BudgetSpentError, DeviceError, Interrupted, TooManyFailuresError
from tuner.halving import Cohort
from tuner.interrupt import Interrupt
from tuner.microbatch import smaller
from tuner.results import EpochDone, Event, Finished, Notice, Record, Spent, Started, Target
from tuner.samplers import asked_together
from tuner.spec import one_line
from tuner.study import end_orphans, may_get_room
from tuner.tell import Ending, Failure, Lane, Teller, Trained
from tuner.train import EpochResult, Job, Lone, Trainer

REFILL_SHARE = 0.25
"""New trials start when at least this share of the lanes is free."""

FAILURES_IN_A_ROW = 10
"""So many trials that raise, one after the other, are not bad luck: the run stops and says why."""

POLL_SECONDS = 0.2
"""How often to look whether the trials that others are training have left room for another one."""


class Budget(Protocol):
    """How many trials may still start; shared by the workers of one command."""

    def take(self) -> bool: ...  # one, if there is one left and time for it
    def give_back(self, count: int) -> None: ...  # those that were not used


@dataclass
class Search:
    """One worker's part of a search, with up to `width` trials at a time.

    `teller` writes to the study's storage, and `assembler` builds what trains the trials.
    """

    study: optuna.Study
    teller: Teller
    assembler: Assembler
    target: Target
    budget: Budget
    interrupt: Interrupt
    width: int = 1
    _lanes: dict[int, Lane] = field(default_factory=dict)
    _trainers: list[Trainer] = field(default_factory=list)
    _asked: int = 0
    _refused: bool = False
    _cohort: Cohort = field(default_factory=Cohort)
    _failures: int = 0
    _finished: int = 0

    def __post_init__(self) -> None:
        self._storage, self._watch = self.teller.storage, self.teller.watch
        self._spec, self._task = self.teller.spec, self.teller.task

    def events(self) -> Iterator[Event]:
        """Run until the budget is spent. Whatever ends it, the trials in training are ended with a reason first.

        Raises `Interrupted`, `TooManyFailuresError`, and `DeviceError` where the device is lost.
        """
        try:
            yield from self._loop()
        except BaseException as error:
            why = str(error) if isinstance(error, Interrupted) else one_line(error)
            if isinstance(error, GeneratorExit):
                why = "nobody waits for it any more"
            ended = self._end([Ending(lane, TrialState.FAIL, f"interrupted: {why}") for lane in self._lanes.values()])
            if not isinstance(error, GeneratorExit):
                yield from ended
                yield Spent(self.teller.worker, dict(self._watch.totals), self._finished)
            raise
        yield Spent(self.teller.worker, dict(self._watch.totals), self._finished)

    def _loop(self) -> Iterator[Event]:
        waited = False
        end_orphans(self.study, self._storage)
        while True:
            self.interrupt.check()
            # A stack of few lanes costs nearly as much as one of many: new trials come in good company.
            if self.width - len(self._lanes) >= self.width * REFILL_SHARE or not self._lanes:
                yield from self._fill()
            if not self._lanes and self._asked:
                continue  # Those that were asked for have failed already.
            if not self._lanes:
                if not self._refused or not may_get_room(self.study, self._storage):
                    return
                if not waited:
                    yield Notice("waiting for trials that others train: each one that fails leaves room for one here")
                waited = True
                time.sleep(POLL_SECONDS)
                self._watch.lap("wait")
            yield from self._round()

    def _fill(self) -> Iterator[Event]:
        """Give each free lane a trial, while the budget lasts."""
        new: list[Lane] = []
        jobs: list[Job] = []
        self._cohort = self.teller.cohort(self.target)
        try:
            with asked_together(self.study.sampler, self.width - len(self._lanes)):
                yield from self._ask_for(new, jobs)
        finally:
            self._storage.reading_paused = False
        self._storage.end_unused()
        self._watch.lap("storage")
        if new:
            yield from self._assemble(new, jobs)

    def _ask_for(self, new: list[Lane], jobs: list[Job]) -> Iterator[Event]:
        """Ask for a trial for each free lane, and append those that can be trained."""
        granted = sum(takewhile(bool, (self.budget.take() for _ in range(self.width - len(self._lanes)))))
        self._refused, self._asked = False, granted
        self._storage.start_together(self.study._study_id, granted)
        for index in range(granted):
            try:
                # What others have finished is read for the first of them: a moment later it is hardly more.
                self._storage.reading_paused = index > 0
                lane = self._ask()
            except BudgetSpentError:
                self.budget.give_back(granted - index)
                self._refused, self._asked = True, index
                break
            failure = self._sample(lane, jobs)
            self._show_to_sampler(lane)
            yield Started(lane.trial.number, lane.trial.params, self.teller.worker)
            self._watch.lap("display")
            if failure is not None:
                yield from self._fail([lane], failure)
            else:
                new.append(lane)

    def _ask(self) -> Lane:
        started, stored = self._watch.now(), self._storage.seconds
        trial = self.study.ask()
        lane = Lane(trial, Record(trial.number, self.target, started), cohort=self._cohort)
        self._lanes[trial.number] = lane
        self._lap("sampler", stored)
        return lane

    def _show_to_sampler(self, lane: Lane) -> None:
        """Let the next trial's sampling know of this one, which runs: samplers keep away from where others look."""
        cache = self.study._storage
        if isinstance(cache, _CachedStorage):
            cache._add_trials_to_cache(self.study._study_id, [lane.trial._cached_frozen_trial])

    def _sample(self, lane: Lane, jobs: list[Job]) -> Failure | None:
        """Sample a trial's hyperparameters and append its job; what a study file's code raises is returned."""
        stored = self._storage.seconds
        try:
            lane.hyperparameters = self._spec.space(lane.trial)
            jobs.append(self._spec.job(lane.trial.number, lane.hyperparameters))
        except Exception as error:
            return Failure.of(error)
        finally:
            self._lap("sampler", stored)
        return None

    def _assemble(self, lanes: Sequence[Lane], jobs: Sequence[Job]) -> Iterator[Event]:
        """Build what trains these trials."""
        device.reset_peak(self._task.device)
        failure: Failure | None = None
        try:
            with self.interrupt.interruptible():
                made = self.assembler.assemble(jobs, self.width)
                device.synchronize(self._task.device)
        except Exception as error:
            failure = Failure.of(error)
        share = self._watch.lap("build")
        for lane in lanes:
            lane.record.build_seconds += share
        if failure:
            return (yield from self._after_failure(lanes, failure))
        self._trainers += made.trainers
        yield from map(Notice, made.notices)
        for number, raised in made.errors.items():
            yield from self._fail([self._lanes[number]], Failure.of(raised))

    def _round(self) -> Iterator[Event]:
        """Train all lanes for an epoch, and decide which of them go on."""
        trained: list[Trained] = []
        # The lanes of a trainer are of one age; at a rung they wait for their cohort's others.
        waiting = [trainer for trainer in self._trainers if not self._lanes[trainer.numbers[0]].at_rung]
        while waiting:
            trainer = waiting.pop(0)
            results = self._train(trainer)
            if isinstance(results, Failure):
                lanes = [self._lanes[number] for number in trainer.numbers]
                del trainer  # The last one that holds its tensors.
                yield from self._after_failure(lanes, results)
                continue
            if isinstance(trainer, Lone) and trainer.micro_batch and results[0].epoch == 0:
                yield Notice(self._lanes[results[0].number].in_parts)
            # Those that a trial has done already are repeated by a smaller stack than the one that failed.
            new = [r for r in results if r.epoch >= self._lanes[r.number].record.epochs]
            trained += [Trained(self._lanes[r.number], r, trainer, len(results)) for r in new]
        stored = self._storage.seconds
        events = self.teller.take(trained)
        for epoch, event in zip(trained, events, strict=True):
            if event is not None:
                self._count(epoch.lane, event)
        pruned = self._end(self.teller.losers(self._lanes.values()))
        self._lap("pruner", stored)
        for epoch, event in zip(trained, events, strict=True):
            value = epoch.result.validation[epoch.lane.record.measure]
            yield event or EpochDone(epoch.result.number, epoch.result.epoch, self._task.epochs, value)
        yield from pruned
        for trainer in self._trainers:
            trainer.leave([number for number in trainer.numbers if number not in self._lanes])
        self._trainers = [trainer for trainer in self._trainers if trainer.numbers]
        self._watch.lap("display")

    def _train(self, trainer: Trainer) -> Sequence[EpochResult] | Failure:
        """An epoch of one trainer; one that raises is gone."""
        try:
            with self.interrupt.interruptible():
                return trainer.epoch(self._watch)
        except Exception as error:
            failure = Failure.of(error)
        self._trainers.remove(trainer)
        return failure

    def _after_failure(self, lanes: Sequence[Lane], failure: Failure) -> Iterator[Event]:
        """A stack that failed is tried again as two of half its width, and a lone trial that does not fit in parts."""
        device.release(self._task.device)
        if len(lanes) == 1 and failure.out_of_memory and not failure.device_lost:
            return (yield from self._shrink(lanes[0], failure))
        if len(lanes) == 1 or failure.device_lost:
            return (yield from self._fail(lanes, failure))
        half = (len(lanes) + 1) // 2
        if not failure.out_of_memory or half < self.width:  # The next one of this width is no news.
            again = f"it is trained again as two of {half}"
            yield Notice(f"a stack of {len(lanes)} trials failed ({failure.reason}); {again}")
        # It stays so: what did not fit would not fit the next time, and each attempt loses what it has trained.
        self.width = min(self.width, half) if failure.out_of_memory else self.width
        for part in (lanes[:half], lanes[half:]):
            jobs = [self._spec.job(lane.trial.number, lane.hyperparameters) for lane in part]
            yield from self._assemble(part, jobs)

    def _shrink(self, lane: Lane, failure: Failure) -> Iterator[Event]:
        """Start a lone trial that does not fit again, with fewer examples at a time."""
        job = self._spec.job(lane.trial.number, lane.hyperparameters)
        try:
            with self.interrupt.interruptible():
                made: Lone | str = smaller(job, self._task, lane.micro_batch)
        except Exception as error:
            made = Failure.of(error).reason
        lane.record.build_seconds += self._watch.lap("build")
        if isinstance(made, Lone):
            lane.micro_batch = made.micro_batch
            self._trainers.append(made)
        else:
            peak = f"at most {device.peak_megabytes(self._task.device):.0f} MB were in use"
            yield from self._fail([lane], replace(failure, reason=f"{failure.reason}; {made}; {peak}"))

    def _end(self, endings: Sequence[Ending]) -> list[Finished | Notice]:
        events = self.teller.end(endings)
        for ending, event in zip(endings, events, strict=True):
            self._count(ending.lane, event)
        return events

    def _count(self, lane: Lane, event: Event) -> None:
        del self._lanes[lane.trial.number]
        if isinstance(event, Finished):
            self._finished += 1
            self._failures = self._failures + 1 if event.state == TrialState.FAIL else 0

    def _fail(self, lanes: Sequence[Lane], failure: Failure) -> Iterator[Event]:
        """End trials whose training raised; the run goes on unless that is pointless."""
        state = TrialState.PRUNED if failure.pruned else TrialState.FAIL
        yield from self._end([Ending(lane, state, failure.reason) for lane in lanes])
        self._watch.lap("storage")
        if failure.device_lost:
            raise DeviceError(f"{self._task.device} is lost to this process ({failure.reason}); start again to resume")
        if self._failures >= FAILURES_IN_A_ROW and not self._lanes:  # Those of a stack come in groups.
            raise TooManyFailuresError(f"{self._failures} trials failed in a row, the last one with: {failure.reason}")

    def _lap(self, part: str, stored: float) -> None:
        """Give the seconds since the last lap to `part`, but those that the storage took to ``storage``."""
        self._watch.lap(part)
        self._watch.move(self._storage.seconds - stored, part, "storage")
