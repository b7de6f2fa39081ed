"""Optuna's own tables, opened so that many processes can share them: one lock to start, and honest transactions.

Optuna's storage is used as it is; each of its methods is one transaction, which here is begun, ended and tried again as
`tuner.storage_transactions` says. A trial's owner and the budget are part of the transaction that starts the trial.

`optuna.create_study(storage=storage)` wraps a storage in a cache of finished trials. Keep the Storage itself for
`record`, `fail_trials_of` and `finished_count`: the cache reads every unfinished trial anew, so it sees what they do.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import BudgetSpentError, StorageError
from tuner.results import REASON
from tuner.storage_rows import (
    WORKER,
    Write,
    attribute_rows,
    counts,
    put,
    put_parameters,
    running_of,
    write_all,
)
from tuner.storage_schema import check_schema, other_schema
from tuner.storage_transactions import (
    Transactional,
    cause_of,
    postgres_sessions,
    prepare_sqlite,
    reads,
    writes,
    writes_own,
)
from tuner.storage_url import (
    BUSY_SECONDS,
    cannot_open,
    check_file,
    check_place,
    identity,
    masked,
    resolve_url,
    sqlite_path,
    start_lock,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

__all__ = ["Storage", "masked", "open_storage", "resolve_url", "sqlite_path", "start_lock"]


def open_storage(url: str, *, create: bool = True) -> Storage:
    """Open the storage at the canonical `url` (see `resolve_url`), making it if it is missing and `create`.

    Raises StorageError, one line, for whatever cannot be opened; nothing is left behind then.
    """
    path = sqlite_path(url)
    if path is None:
        return Storage(url)
    check_place(path)
    with start_lock(url):
        check_file(path, create=create)
        if not path.exists():
            return _made(url, path)
        check_schema(url, path)
        return Storage(url)


def _made(url: str, path: Path) -> Storage:
    try:
        return Storage(url)
    except StorageError:
        for end in ("", "-journal", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        raise


class Storage(Transactional):
    """An Optuna storage for many processes. Open it with `open_storage`.

    `owner`: if not empty, the user attribute ``worker`` of each trial that is started here (created or claimed).
    `total_limit`: if not None, no trial is started here once its study holds as many complete, pruned and running
    ones: BudgetSpentError, and nothing is written. Both are part of the transaction that starts the trial.
    `queued_only`: no trial is started here that was not queued before: BudgetSpentError.
    `reports_are_news`: whether a cache has to read the reports of trials that run here; some pruners compare them.
    `reading_paused`: what others have written since is not read for a while, through Optuna's cache.
    """

    def __init__(self, url: str) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        self.given_url = url
        self.owner = ""
        self.total_limit: int | None = None
        self.queued_only = False
        self.reading_paused = False
        self.reports_are_news = True
        self._version: tuple[int, int] | None = None
        self.gathered = []
        # On a server, a connection that died while a trial was trained is replaced before it is used.
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        lite = sqlite_path(url) is not None
        if lite:
            options = {"connect_args": {"timeout": BUSY_SECONDS}}
        with start_lock(url):
            try:
                # `check_schema` has looked at a file already, and loading the history of the tables takes a while.
                super().__init__(url.replace("{", "{{").replace("}", "}}"), options, skip_compatibility_check=lite)
            except (SQLAlchemyError, StorageInternalError, ImportError, ValueError) as error:
                _dispose(getattr(self, "engine", None), os.getpid())
                raise cannot_open(url, cause_of(error)) from None
            except RuntimeError:  # Optuna's word for tables of another version
                _dispose(getattr(self, "engine", None), os.getpid())
                raise other_schema(url) from None
            if lite:
                prepare_sqlite(self.engine)
                self.identity = identity(url)
            else:
                self.scoped_session = postgres_sessions(self.engine)
        # Nobody has to remember `close`: at the latest it happens when the process ends.
        weakref.finalize(self, _dispose, self.engine, os.getpid())

    def __repr__(self) -> str:
        return f"Storage({masked(self.given_url)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Optuna's own restoring would build an engine without the transactions of this module.
        return _reopened, (self.given_url, self.owner, self.total_limit, self.queued_only)

    def close(self) -> None:
        """Give the connections back; the last to close a SQLite file leaves no write-ahead log beside it."""
        self.scoped_session.remove()
        self.engine.dispose()

    def record(
        self,
        trial_id: int,
        *,
        attributes: Mapping[str, Any] | None = None,
        reports: Mapping[int, float] | None = None,
        state: TrialState | None = None,
        values: Sequence[float] | None = None,
    ) -> None:
        """Write all that is new of one running trial in one transaction: all of it is durable on return, or none.

        The arguments are those of a `Write`. Raises UpdateFinishedTrialError, and writes nothing, if it was ended
        before, by whomever; KeyError if it is unknown.
        """
        write = Write(trial_id, attributes or {}, reports or {}, state, values or ())
        if self.record_all([write]):
            raise UpdateFinishedTrialError(f"trial {trial_id} was ended before")

    @writes_own
    def record_all(self, new: Sequence[Write]) -> set[int]:
        """Write what is new of several trials in one transaction: all of it is durable on return.

        Returns the trials that somebody else had ended before; of those nothing is written. KeyError if one is unknown.
        """
        with _create_scoped_session(self.scoped_session) as session:
            put_parameters(session, self.gathered)
            lost = write_all(session, new)
        self.gathered.clear()
        self.changed = self.changed or self.reports_are_news or bool(lost) or any(write.state for write in new)
        return lost

    def flush(self) -> None:
        """Write the parameters that have been gathered."""
        if self.gathered:
            self.record_all([])

    @writes
    def fail_trials_of(self, study_id: int, owner: str, reason: str) -> list[int]:
        """End the running trials of the worker `owner` as failed, with `reason`, all at once; their numbers.

        For a worker whose process is gone: one that lives learns it from UpdateFinishedTrialError at its next write.
        """
        with _create_scoped_session(self.scoped_session) as session:
            found = running_of(session, study_id, owner)
            write_all(session, [Write(t.trial_id, {REASON: reason}, state=TrialState.FAIL) for t in found])
            return [trial.number for trial in found]

    @reads
    def finished_count(self, study_id: int) -> tuple[int, int]:
        """How many of the study's trials are complete or pruned, and how many are running."""
        with _create_scoped_session(self.scoped_session) as session:
            found = counts(session, study_id)
        return found[TrialState.COMPLETE] + found[TrialState.PRUNED], found[TrialState.RUNNING]

    @writes_own  # Optuna's cache adds the trial itself.
    def _create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> FrozenTrial:
        # As Optuna's, without its own retries: up to five more waits for a lock.
        from optuna.storages._rdb import models

        if self.queued_only and template_trial is None:
            raise BudgetSpentError("wanted a queued trial, found none")
        frozen = copy.deepcopy(template_trial) if template_trial else optuna.create_trial(state=TrialState.RUNNING)
        with _create_scoped_session(self.scoped_session) as session:
            models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            put_parameters(session, self.gathered)
            trial: Any = self._get_prepared_new_trial(study_id, template_trial, session)
            if trial.state == TrialState.RUNNING:
                frozen.user_attrs.update(self._start(session, study_id, trial.trial_id))
            frozen.number, frozen._trial_id = trial.number, trial.trial_id
            frozen.datetime_start = trial.datetime_start
        self.gathered.clear()
        return frozen

    @writes
    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        if state != TrialState.RUNNING:
            return super().set_trial_state_values(trial_id, state, values)
        from optuna.storages._rdb import models

        with _create_scoped_session(self.scoped_session) as session:
            study_id = session.query(models.TrialModel.study_id).filter_by(trial_id=trial_id).scalar()
            if self.total_limit is not None and study_id is not None:
                models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            trial: Any = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
            self.check_trial_is_updatable(trial_id, trial.state)
            if trial.state != TrialState.WAITING:
                return False
            self._start(session, trial.study_id, trial_id)
            trial.state = TrialState.RUNNING
            trial.datetime_start = datetime.now()
        return True

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        # What Optuna's cache asks for; without an answer it keeps what it has.
        if (included_trial_ids or trial_id_greater_than > -1) and (self.reading_paused or not self._is_news()):
            return []
        return self._read_trials(study_id, states, included_trial_ids, trial_id_greater_than)

    def _is_news(self) -> bool:
        """Whether a cache has anything to read: all but reports and starts of trials that run here."""
        before, self._version = self._version, self._read_version()
        news = self.changed or self._version is None or self._version != before
        self.changed = False
        return news

    @reads
    def _read_version(self) -> tuple[int, int] | None:
        """A value that changes when another connection has written to the SQLite file; None on a server."""
        if self.identity is None:
            return None
        with _create_scoped_session(self.scoped_session) as session:
            raw: Any = session.connection().connection.dbapi_connection
            (version,) = raw.execute("PRAGMA data_version").fetchone()
        return id(raw), version

    def _start(self, session: Session, study_id: int, trial_id: int) -> dict[str, Any]:
        """What belongs to the start of a trial, once its study is locked: the budget, then its attributes."""
        from optuna.storages._rdb import models

        if self.total_limit is not None:
            held = sum(counts(session, study_id, besides=trial_id).values())
            if held >= self.total_limit:
                raise BudgetSpentError(
                    f"wanted to start a trial, found {held} complete, pruned or running of {self.total_limit}"
                )
        attributes = {WORKER: self.owner} if self.owner else {}
        put(session, models.TrialUserAttributeModel, attribute_rows(trial_id, attributes))
        return attributes


def _dispose(engine: Engine | None, process: int) -> None:
    if engine is not None and os.getpid() == process:  # a forked child must not end its parent's connections
        engine.dispose()


def _reopened(url: str, owner: str, total_limit: int | None, queued_only: bool) -> Storage:
    storage = open_storage(url, create=False)
    storage.owner, storage.total_limit, storage.queued_only = owner, total_limit, queued_only
    return storage
