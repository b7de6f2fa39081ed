"""Optuna's own tables, opened so that many processes can share them: one lock to start, and honest transactions.

Optuna's storage is used as it is; each of its methods is one transaction, which here is begun, ended and tried again as
`tuner.storage_transactions` says. A trial's owner and the budget are part of the transaction that starts the trial.

`optuna.create_study(storage=storage)` wraps a storage in a cache of finished trials. Keep the Storage itself for
`record`, `fail_trials_of` and `finished_count`: the cache reads every unfinished trial anew, so it sees what they do.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import StorageError
from tuner.results import REASON
from tuner.storage_rows import (
    Write,
    counts,
    owned,
    put_parameters,
    running_of,
    write_all,
)
from tuner.storage_schema import check_schema, other_schema
from tuner.storage_starts import Starting
from tuner.storage_transactions import (
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


class Storage(Starting):
    """An Optuna storage for many processes. Open it with `open_storage`.

    `reading_paused`: what others have written since is not read for a while, through Optuna's cache.
    """

    def __init__(self, url: str) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        self.given_url = url
        self.started = []
        self.reading_paused = False
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
        self.changed = self.changed or bool(lost) or any(write.state for write in new)
        return lost

    def end_unused(self) -> None:
        """End the trials that were started together and that nobody asked for; write what has been gathered."""
        unused, self.started = self.started, []
        ended = [
            Write(t._trial_id, {REASON: "it was started together with others, and not trained"}, state=TrialState.FAIL)
            for t in unused
        ]
        if ended or self.gathered:
            self.record_all(ended)

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
    def started_by(self, study_id: int, owner: str) -> int:
        """How many trials of the study the worker `owner` has started, however they ended."""
        with _create_scoped_session(self.scoped_session) as session:
            return int(owned(session, study_id, owner).count())

    @reads
    def finished_count(self, study_id: int) -> tuple[int, int]:
        """How many of the study's trials are complete or pruned, and how many are running."""
        with _create_scoped_session(self.scoped_session) as session:
            found = counts(session, study_id)
        return found[TrialState.COMPLETE] + found[TrialState.PRUNED], found[TrialState.RUNNING]

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

    def is_news(self) -> bool:
        """Whether there is anything to read since the last call, but reports and starts of trials that run here.

        For one cache alone, which reads then: another one would miss what this has read.
        """
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


def _dispose(engine: Engine | None, process: int) -> None:
    if engine is not None and os.getpid() == process:  # a forked child must not end its parent's connections
        engine.dispose()


def _reopened(url: str, owner: str, total_limit: int | None, queued_only: bool) -> Storage:
    storage = open_storage(url, create=False)
    storage.owner, storage.total_limit, storage.queued_only = owner, total_limit, queued_only
    return storage
