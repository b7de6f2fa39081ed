"""What one worker does: the part of a command that can be sent to another process, and the search that it becomes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import optuna
import torch

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Data
from tuner.device import set_precision
from tuner.interrupt import Interrupt
from tuner.owner import this_process
from tuner.results import Target
from tuner.samplers import pruner, sampler
from tuner.search import Budget, Search
from tuner.spec import LoadedSpec
from tuner.storage import Storage, open_storage
from tuner.tell import Teller
from tuner.weights import WeightsFolder


@dataclass(frozen=True)
class Assignment:
    """What each worker of a command does; it can be sent to another process."""

    source: str
    url: str
    study_name: str
    target: Target
    device: str
    threads: int
    lanes: int
    precision: str
    sampler: str
    pruner: str
    threshold: float | None
    seed: int | None
    run: int
    total_limit: int | None
    weights: str | None

    def sampler_seed(self, worker: int) -> int | None:
        """A seed of its own for each worker of each run on a study: equal ones would repeat the same samples."""
        if self.seed is None:
            return None
        if self.run == worker == 0:
            return self.seed
        return random.Random(f"{self.seed}/{self.run}/{worker}").getrandbits(31)


@dataclass
class CountedBudget:
    """A number of trials (None: any), until a moment of the monotonic clock (None: for ever)."""

    trials: int | None
    deadline: float | None

    @classmethod
    def until(cls, trials: int | None, seconds: float | None) -> CountedBudget:
        """A budget that ends in `seconds` from now, if it is not spent before."""
        return cls(trials, None if seconds is None else time.monotonic() + seconds)

    def take(self) -> bool:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return False
        if self.trials is None:
            return True
        self.trials -= 1
        return self.trials >= 0

    def give_back(self, count: int) -> None:
        if self.trials is not None:
            self.trials = max(self.trials, 0) + count


def make_search(
    assignment: Assignment,
    loaded: LoadedSpec,
    data: Data,
    device: torch.device,
    budget: Budget,
    watch: Stopwatch,
    interrupt: Interrupt,
    worker: int = 0,
    storage: Storage | None = None,
    assembler: Assembler | None = None,
) -> Search:
    """The search of one worker, in the process that is going to run it.

    `storage` is given if it is open already, and `assembler` if one knows programs for networks of this study.
    """
    storage = storage or open_storage(assignment.url, create=False)
    storage.owner = this_process()
    storage.total_limit = assignment.total_limit
    storage.gathering = True
    storage.queued_only = assignment.sampler == "grid"
    spec, target = loaded.spec, assignment.target
    study = optuna.load_study(
        study_name=assignment.study_name,
        storage=storage,
        sampler=sampler(assignment.sampler, assignment.sampler_seed(worker)),
        pruner=pruner(assignment.pruner, spec.epochs, assignment.threshold, target.maximize[0]),
    )
    set_precision(assignment.precision)
    task = spec.task(data, device, assignment.precision)
    weights = None if assignment.weights is None else WeightsFolder(Path(assignment.weights), assignment.study_name)
    teller = Teller(study, storage, spec, task, watch, storage.owner, weights)
    assembler = Assembler(task) if assembler is None else assembler.on(task)
    return Search(study, teller, assembler, target, budget, interrupt, assignment.lanes)
