"""How a transaction on a shared database begins, ends and is tried again, so that it happens once or not at all.

SQLite: a transaction that writes begins with BEGIN IMMEDIATE: it waits at its start, when it has read nothing, and what
it reads is true until it commits (SELECT ... FOR UPDATE, which Optuna relies on, is ignored by SQLite). One that only
reads begins with BEGIN, and in a write-ahead log waits for nobody. PostgreSQL: when the connection is lost while the
server commits, the server is asked afterwards whether it did.
"""

from __future__ import annotations

import functools
import logging
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage

from tuner.errors import StorageError, StorageLostError
from tuner.storage_rows import Parameter
from tuner.storage_url import BUSY_SECONDS, identity, masked, sqlite_path, without_secrets

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, scoped_session

P = ParamSpec("P")
R = TypeVar("R")

_SQLITE_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
# Serialization failure, deadlock, lock not available, too many connections; and the classes 08 (connection) and
# 57P (the server stops or starts). https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRES_PASSING = ("40001", "40P01", "55P03", "53300", "08", "57P")

_logger = logging.getLogger(__name__)
_only_reads = ContextVar("_only_reads", default=False)
_jitter = random.Random()  # not the global generator: a retry must not change what a user's program draws


def writes(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """`method` of a Storage, one transaction that may write, tried again while what hinders it will pass.

    It raises StorageError when that has lasted for BUSY_SECONDS.
    """
    return _tried_again(method, reads=False, news=True)


def writes_own(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """As `writes`, for a method that says itself, by `changed`, whether it wrote what a cache of trials has to read."""
    return _tried_again(method, reads=False, news=False)


def reads(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """As `writes`, for a method that only reads: it does not wait for those who write."""
    return _tried_again(method, reads=True, news=False)


def _tried_again(
    method: Callable[Concatenate[Any, P], R], *, reads: bool, news: bool
) -> Callable[Concatenate[Any, P], R]:
    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if reads and not self.inside:
            self.flush()
        started = time.monotonic()
        full = False
        outermost, self.inside = not self.inside, True
        self.changed = self.changed or news
        token = _only_reads.set(reads)
        deadline = started + BUSY_SECONDS
        pause = 0.02
        try:
            while True:
                try:
                    self.check_still_there()
                    return method(self, *args, **kwargs)
                except Exception as error:
                    if _is_full(error):
                        if not full:
                            _logger.warning("no room on the disk of %s; waiting for some", masked(self.given_url))
                        full, deadline = True, time.monotonic() + BUSY_SECONDS
                    elif not _will_pass(error):
                        raise
                    if time.monotonic() + pause > deadline:
                        raise _gave_up(self.given_url, error) from error
                time.sleep(pause * _jitter.uniform(0.5, 1.5))
                pause = min(2 * pause, 2.0)
        finally:
            _only_reads.reset(token)
            if outermost:
                self.inside = False
                self.seconds += time.monotonic() - started

    return call


class Transactional(RDBStorage):
    """Optuna's storage with each call in a transaction of the right kind.

    `seconds`: how long the calls have taken; `inside`: whether one is going on. `gathering`: sampled parameters wait in
    `gathered` for the next write or reading, and share its transaction. `changed`: whether a cache of trials has to
    read what was written here.
    """

    given_url: str
    seconds = 0.0
    inside = False
    gathering = False
    changed = True
    gathered: list[Parameter]
    identity: tuple[int, int] | None = None

    def check_still_there(self) -> None:
        """Raise StorageLostError if the SQLite file was deleted or replaced: SQLite itself would not notice."""
        if self.identity is not None and identity(self.given_url) != self.identity:
            raise StorageLostError(
                f"{sqlite_path(self.given_url)} was deleted or replaced while it was in use; what was written since is"
                " lost: put the file back from a copy, or start again"
            )

    def flush(self) -> None:
        """Write what has been gathered, before something is read."""

    def _set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        if self.gathering and previous_distribution is not None:
            check_distribution_compatibility(previous_distribution, distribution)
            self.gathered.append(Parameter(trial_id, param_name, param_value_internal, distribution))
        else:
            self._write_trial_param(trial_id, param_name, param_value_internal, distribution, previous_distribution)

    create_new_study = writes(RDBStorage.create_new_study)
    delete_study = writes(RDBStorage.delete_study)
    set_study_user_attr = writes(RDBStorage.set_study_user_attr)
    set_study_system_attr = writes(RDBStorage.set_study_system_attr)
    set_trial_intermediate_value = writes(RDBStorage.set_trial_intermediate_value)
    set_trial_user_attr = writes(RDBStorage.set_trial_user_attr)
    set_trial_system_attr = writes(RDBStorage.set_trial_system_attr)
    record_heartbeat = writes(RDBStorage.record_heartbeat)
    _write_trial_param = writes(RDBStorage._set_trial_param)

    get_study_id_from_name = reads(RDBStorage.get_study_id_from_name)
    get_study_name_from_id = reads(RDBStorage.get_study_name_from_id)
    get_study_directions = reads(RDBStorage.get_study_directions)
    get_study_user_attrs = reads(RDBStorage.get_study_user_attrs)
    get_study_system_attrs = reads(RDBStorage.get_study_system_attrs)
    get_all_studies = reads(RDBStorage.get_all_studies)
    get_trial = reads(RDBStorage.get_trial)
    get_trial_param = reads(RDBStorage.get_trial_param)
    get_trial_user_attrs = reads(RDBStorage.get_trial_user_attrs)
    get_trial_system_attrs = reads(RDBStorage.get_trial_system_attrs)
    get_trial_id_from_study_id_trial_number = reads(RDBStorage.get_trial_id_from_study_id_trial_number)
    _read_trials = reads(RDBStorage._get_trials)
    _get_best_trial_id = reads(RDBStorage._get_best_trial_id)
    _get_stale_trial_ids = reads(RDBStorage._get_stale_trial_ids)


def cause_of(error: Exception) -> Exception:
    """What SQLAlchemy raised, where Optuna has wrapped it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else None
    return cause if isinstance(cause, Exception) else error


def _will_pass(error: Exception) -> bool:
    """Whether nothing was written because of others, or of a connection: the same again may succeed."""
    from sqlalchemy.exc import DBAPIError

    cause = cause_of(error)
    if not isinstance(cause, DBAPIError):
        return False
    if isinstance(cause.orig, sqlite3.Error):
        return getattr(cause.orig, "sqlite_errorcode", 0) & 0xFF in _SQLITE_PASSING
    state = getattr(cause.orig, "sqlstate", None)
    # psycopg gives no state when the server cannot be reached.
    return cause.connection_invalidated or (
        state.startswith(_POSTGRES_PASSING) if state else "Operational" in type(cause).__name__
    )


def _is_full(error: Exception) -> bool:
    """Whether the disk has no room: what was to be written is written when there is some again."""
    original = getattr(cause_of(error), "orig", None)
    if isinstance(original, sqlite3.Error):
        return getattr(original, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return getattr(original, "sqlstate", None) == "53100"


def _gave_up(url: str, error: Exception) -> StorageError:
    cause = cause_of(error)
    reason = without_secrets(str(getattr(cause, "orig", None) or cause), url)
    return StorageError(
        f"wanted to use the storage {masked(url)}, found for {BUSY_SECONDS:.0f} s: {reason}; end the program that"
        " holds it, then run the same command again"
    )


def prepare_sqlite(engine: Engine) -> None:
    """Make every transaction on this engine begin as it should, on a database with a write-ahead log.

    Only after Optuna's constructor, which opens a second connection while a session is open: with BEGIN IMMEDIATE it
    would wait for itself.
    """
    from sqlalchemy import event

    engine.dispose()  # connections of before know nothing of what follows
    event.listen(engine, "connect", _connected)
    event.listen(engine, "begin", _begin)
    # It stays in the file. The change needs the file for itself: if another program reads it for long just now, it is
    # left to the next that opens it, and until then readers and writers wait for each other.
    with closing(engine.raw_connection()) as connection, suppress(sqlite3.OperationalError):
        connection.cursor().execute("PRAGMA busy_timeout=2000")
        connection.cursor().execute("PRAGMA journal_mode=WAL")
    engine.dispose()  # that connection with its short timeout


def _connected(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the driver starts no transactions; `_begin` does
    # In a write-ahead log, NORMAL may lose the last commits in a power cut (https://www.sqlite.org/pragma.html,
    # synchronous); what was told is durable when `tell` returns.
    connection.execute("PRAGMA synchronous=FULL")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN" if _only_reads.get() else "BEGIN IMMEDIATE")


def postgres_sessions(engine: Engine) -> scoped_session[Session]:
    """Sessions whose commit, when its answer is lost, is neither done twice nor forgotten."""
    from sqlalchemy import orm
    from sqlalchemy.exc import DBAPIError

    class SureSession(orm.Session):
        def commit(self) -> None:
            transaction = None
            if not _only_reads.get():
                self.flush()
                connection = self.connection()
                transaction = connection.exec_driver_sql("SELECT pg_current_xact_id_if_assigned()::text").scalar()
            try:
                super().commit()
            except DBAPIError as error:
                lost = transaction is not None and error.connection_invalidated
                if not (lost and _was_committed(engine, str(transaction))):
                    raise

    return orm.scoped_session(orm.sessionmaker(bind=engine, class_=SureSession))


def _was_committed(engine: Engine, transaction: str) -> bool:
    """Whether the server committed the `transaction` (an xid8); waits until it is reachable and has decided."""
    from sqlalchemy.exc import DBAPIError

    deadline = time.monotonic() + BUSY_SECONDS
    status = "unreachable"
    while time.monotonic() < deadline:
        with suppress(DBAPIError), engine.connect() as connection:
            status = connection.exec_driver_sql(f"SELECT pg_xact_status('{int(transaction)}')").scalar_one()
        if status in ("committed", "aborted"):
            return bool(status == "committed")
        time.sleep(0.2)
    raise StorageError(
        f"wanted to know whether the last write is in the database, found the server {status} for"
        f" {BUSY_SECONDS:.0f} s; run the same command again when it is reachable"
    )
