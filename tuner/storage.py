"""Optuna's own tables, opened so that many processes can share them: one lock to start, and honest transactions.

Optuna's storage is used as it is; each of its methods is one transaction, which here is begun, ended and tried again as
`tuner.storage_transactions` says. A trial's owner and the budget are part of the transaction that starts the trial.

`optuna.create_study(storage=storage)` wraps a storage in a cache of finished trials. Keep the Storage itself for
`record`, `fail_trials_of` and `finished_count`: the cache reads every unfinished trial anew, so it sees what they do.
"""

from __future__ import annotations

import copy
import os
import sqlite3
import weakref
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
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
from tuner.storage_transactions import Transactional, cause_of, postgres_sessions, prepare_sqlite, reads, writes
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
        _check_schema(url, path)
        return Storage(url)


def _made(url: str, path: Path) -> Storage:
    try:
        return Storage(url)
    except StorageError:
        for end in ("", "-journal", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        raise


def _check_schema(url: str, path: Path) -> None:
    """Raise StorageError if other versions of Optuna made the tables, before the constructor adds its own to them."""
    from optuna.storages._rdb import models

    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        try:
            stamps, before = (
                connection.execute(f"SELECT {column} FROM {table}").fetchall() if table in tables else []
                for table, column in (("alembic_version", "version_num"), ("version_info", "schema_version"))
            )
        except sqlite3.Error as error:
            raise cannot_open(url, error) from None
    if stamps == [(schema_versions()[0],)] or (not stamps and before in ([], [(models.SCHEMA_VERSION,)])):
        return
    raise _other_schema(url)


def schema_versions() -> list[str]:
    """The versions of the tables that this Optuna knows, its own first."""
    from alembic.script import ScriptDirectory
    from optuna.storages._rdb import models

    history = ScriptDirectory(str(Path(models.__file__).with_name("alembic")))
    return [script.revision for script in history.walk_revisions()]


def _other_schema(url: str) -> StorageError:
    return StorageError(
        f"wanted tables of Optuna {optuna.__version__}, found those of another version in {masked(url)}; copy it, then"
        f" run: optuna storage upgrade --storage '{masked(url)}' (or install the Optuna that made it, if that is newer)"
    )


class Storage(Transactional):
    """An Optuna storage for many processes. Open it with `open_storage`.

    `owner`: if not empty, the user attribute ``worker`` of each trial that is started here (created or claimed).
    `total_limit`: if not None, no trial is started here once its study holds as many complete, pruned and running
    ones: BudgetSpentError, and nothing is written. Both are part of the transaction that starts the trial.
    `queued_only`: no trial is started here that was not queued before: BudgetSpentError.
    `reading_paused`: what others have written since is not read for a while, through Optuna's cache.
    """

    def __init__(self, url: str) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        self.given_url = url
        self.owner = ""
        self.total_limit: int | None = None
        self.queued_only = False
        self.reading_paused = False
        self.gathered = []
        # On a server, a connection that died while a trial was trained is replaced before it is used.
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        lite = sqlite_path(url) is not None
        if lite:
            options = {"connect_args": {"timeout": BUSY_SECONDS}}
        with start_lock(url):
            try:
                # `_check_schema` has looked at a file already, and loading the history of the tables takes a while.
                super().__init__(url.replace("{", "{{").replace("}", "}}"), options, skip_compatibility_check=lite)
            except (SQLAlchemyError, StorageInternalError, ImportError, ValueError) as error:
                _dispose(getattr(self, "engine", None), os.getpid())
                raise cannot_open(url, cause_of(error)) from None
            except RuntimeError:  # Optuna's word for tables of another version
                _dispose(getattr(self, "engine", None), os.getpid())
                raise _other_schema(url) from None
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

    @writes
    def record_all(self, new: Sequence[Write]) -> set[int]:
        """Write what is new of several trials in one transaction: all of it is durable on return.

        Returns the trials that somebody else had ended before; of those nothing is written. KeyError if one is unknown.
        """
        with _create_scoped_session(self.scoped_session) as session:
            put_parameters(session, self.gathered)
            lost = write_all(session, new)
        self.gathered.clear()
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

    @writes
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
        if self.reading_paused and (included_trial_ids or trial_id_greater_than > -1):
            return []
        return self._read_trials(study_id, states, included_trial_ids, trial_id_greater_than)

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
