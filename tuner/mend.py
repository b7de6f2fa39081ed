"""Mend a storage: what each finding that can be mended says, and nothing else. Look again afterwards."""

from __future__ import annotations

from tuner.errors import StorageError, TunerError
from tuner.health import Health, inspect, is_orphan, numbered, references
from tuner.sqlite_file import mend_indexes, mend_journal
from tuner.storage import open_storage, sqlite_path

_LEFT_ALONE = frozenset({"corrupt", "foreign", "kind", "missing", "permission", "place", "schema"})


def mend(health: Health) -> list[str]:
    """Mend what `health` says can be mended; what was done, a line each. Raises TunerError.

    A damaged file, and tables of another version or program, are left alone.
    """
    if any(finding.code in _LEFT_ALONE for finding in health.findings):
        return []
    path, codes = sqlite_path(health.url), _mendable(health)
    done = []
    if path is not None and "indexes" in codes:
        done.append(mend_indexes(path))
        health = inspect(health.url)  # the rows behind them could not be trusted before
        codes = _mendable(health)
    if path is not None and codes & {"journal", "log"}:  # before the rows: to open a storage for writing does it too
        done.append(mend_journal(path))
    if codes & {"zombies", "orphans"}:
        try:
            done += _mend_rows(health)
        except StorageError as error:
            raise TunerError(str(error)) from error
    return done


def _mendable(health: Health) -> set[str]:
    return {finding.code for finding in health.findings if finding.mendable}


def _mend_rows(health: Health) -> list[str]:
    done = []
    storage = open_storage(health.url, create=False)
    try:
        for study in health.studies:
            for owner in study.zombies:
                ended = storage.fail_trials_of(study.id, owner, f"its process is gone ({owner})")
                if ended:  # else somebody was quicker
                    done.append(f"study {study.name!r}: ended {numbered(ended)} as failed, of a process that is gone")
        if health.orphans:
            with storage.engine.begin() as connection:
                for table, column, parent in references():
                    count = connection.execute(table.delete().where(is_orphan(column, parent))).rowcount
                    if count:
                        done.append(f"deleted {count} rows of {table.name} that belonged to nothing")
    finally:
        storage.close()
    return done
