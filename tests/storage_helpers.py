"""Several real processes that do the same thing with a storage at the same moment. What they do is at the top level,
so that a spawned process finds it by name."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from tuner.errors import BudgetSpentError
from tuner.storage import Storage, open_storage

STUDY = "together"
SIZES = (2, 4, 8)
_barriers: dict[int, Barrier] = {}


class Crew:
    """Processes that are started once, because a start costs more than what most tests do in them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.barriers = {size: context.Barrier(size) for size in SIZES}
        self.pool = ProcessPoolExecutor(max(SIZES), mp_context=context, initializer=_join, initargs=(self.barriers,))

    def together(self, processes: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `work(barrier, number of the process, *arguments)` returns in each of so many processes, or raises."""
        self.barriers[processes].reset()
        running = [self.pool.submit(_work, work, processes, number, *arguments) for number in range(processes)]
        return [future.result(timeout=100) for future in running]


def _join(barriers: dict[int, Barrier]) -> None:
    _barriers.update(barriers)
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _work(work: Callable[..., Any], processes: int, number: int, *arguments: Any) -> Any:
    barrier = _barriers[processes]
    try:
        barrier.wait(60)  # nobody begins a second task before all have one
        return work(barrier, number, *arguments)
    except BaseException:
        barrier.abort()
        raise


def study_in(storage: Storage) -> optuna.Study:
    """The one study of these tests, made or loaded."""
    return optuna.create_study(storage=storage, study_name=STUDY, load_if_exists=True)


def open_each(barrier: Barrier, number: int, urls: Sequence[str]) -> int:
    """Open each of `urls` at the same moment as the others; returns how many."""
    for url in urls:
        barrier.wait(60)
        open_storage(url).close()
    return len(urls)


def claim_all(barrier: Barrier, number: int, url: str) -> list[int]:
    """Run what is queued until nothing is; the numbers of the trials that were claimed here."""
    storage = open_storage(url)
    storage.owner = f"worker-{number}"
    study = study_in(storage)
    claimed = []
    barrier.wait(60)
    while (trial_id := study._pop_waiting_trial_id()) is not None:
        claimed.append(storage.get_trial(trial_id).number)
        storage.record(trial_id, state=TrialState.COMPLETE, values=[0.0])
    storage.close()
    return claimed


def run_trials(barrier: Barrier, number: int, url: str, trials: int, total_limit: int | None) -> tuple[list[int], bool]:
    """Run up to `trials` instant trials; their numbers, and whether the budget ended it."""
    storage = open_storage(url)
    storage.owner, storage.total_limit = f"worker-{number}", total_limit
    study = study_in(storage)
    numbers = []
    barrier.wait(60)
    try:
        for _ in range(trials):
            trial = study.ask()
            numbers.append(trial.number)
            state = TrialState.PRUNED if trial.number % 3 == 1 else TrialState.COMPLETE
            storage.record(trial._trial_id, attributes={"n": number}, reports={0: 1.0}, state=state, values=[1.0])
    except BudgetSpentError:
        return numbers, True
    finally:
        storage.close()
    return numbers, False


def finish_each(barrier: Barrier, number: int, url: str, trial_ids: Sequence[int], through_optuna: bool) -> list[int]:
    """End each of `trial_ids` at the same moment as the others; those that were told to have ended here."""
    storage = open_storage(url)
    won = []
    for trial_id in trial_ids:
        barrier.wait(60)
        try:
            if through_optuna:
                storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [float(number)])
            else:
                storage.record(trial_id, attributes={"by": number}, state=TrialState.COMPLETE, values=[float(number)])
        except UpdateFinishedTrialError:
            continue
        won.append(trial_id)
    storage.close()
    return won


def hold_write_lock(path: Path, seconds: float, held: Any) -> None:
    """Another program that writes for a while: hold SQLite's write lock on `path`."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        held.set()
        time.sleep(seconds)
        connection.execute("ROLLBACK")
