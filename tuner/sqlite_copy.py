"""Copies of a SQLite database: of one moment while others write to it, and of what can still be read of a damaged one.

A copy appears whole or not at all, after it has been checked.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tuner.errors import TunerError, UsageError
from tuner.sqlite_file import log_bytes, look, size_text, way_out

_PAGES_AT_ONCE = 1024
_TELL_SECONDS = 2.0


def copy_database(
    source: Path, target: Path, *, overwrite: bool, progress: Callable[[int, int], None]
) -> Mapping[str, Mapping[str, int]]:
    """Copy a database to `target` while others write to it: all that was committed when the copying began.

    `progress` is told pages (done, of all) every now and then. Returns study -> state -> number of trials in the copy.
    Raises UsageError for a `target` that cannot be taken, TunerError where the copying fails; then a `target` that was
    there is still there.
    """
    with _appearing(source, target, overwrite) as made:
        _copy(source, made, progress)
        return _checked(source, made)


def salvage_database(source: Path, target: Path) -> tuple[Mapping[str, Mapping[str, int]], list[str]]:
    """Copy what can be read of a damaged database to `target`; what is in it as above, and the tables with losses.

    Each table is read from its first row on until that fails, then from its last one back (as the ``.dump`` of SQLite's
    shell does). Raises as above.
    """
    with _appearing(source, target, overwrite=False) as made:
        lost = _salvage(source, made)
        return _checked(source, made), lost


@contextmanager
def _appearing(source: Path, target: Path, overwrite: bool) -> Iterator[Path]:
    """Where to make the copy; it is at `target` when the block ends, and nowhere when that raises."""
    try:
        _check_target(source, target, overwrite)
        need, free = source.stat().st_size + log_bytes(source.resolve()), shutil.disk_usage(target.parent).free
        if free < need:
            raise TunerError(f"wanted {size_text(need)} for {target}, found {size_text(free)} free; make room")
        # A folder of its own in the same file system: what a failure leaves goes with it.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            yield made
            shutil.copymode(source, made)
            _check_target(source, target, overwrite)
            os.replace(made, target)
        descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (sqlite3.Error, OSError) as error:
        raise TunerError(f"wanted a copy of {source} at {target}, found: {error}; no copy was made") from error


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"wanted an existing directory for the copy, found none at {target.parent}; make it first")
    if target.is_dir() or (target.exists() and (not target.is_file() or target.samefile(source))):
        raise UsageError(f"wanted a new file for the copy, found {target}; name another")
    if target.exists() and not overwrite:
        raise UsageError(f"wanted a new file for the copy, found {target}; name another, or say --overwrite")
    for end in ("-wal", "-journal"):
        # SQLite would take it for the copy's.
        beside = target.with_name(target.name + end)
        if beside.exists():
            raise UsageError(f"wanted a place for the copy that no program uses, found {beside}; name another")


def _copy(source: Path, made: Path, progress: Callable[[int, int], None]) -> None:
    """Copy page by page. SQLite itself waits for the disk before it calls the copy complete."""
    told = time.monotonic()

    def tell(status: int, remaining: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            progress(total - remaining, total)

    with closing(look(source)) as reader, closing(sqlite3.connect(made)) as writer:
        # One snapshot from the first page to the last: without it SQLite starts again whenever somebody has written.
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        reader.backup(writer, pages=_PAGES_AT_ONCE, progress=tell)


def _salvage(source: Path, made: Path) -> list[str]:
    """Make the tables and indexes anew, and fill them with the rows that can be read; the tables that lost some."""
    lost: list[str] = []
    with closing(look(source, damaged=True)) as reader, closing(sqlite3.connect(made, isolation_level=None)) as writer:
        reader.text_factory = lambda text: text.decode(errors="replace")
        names = "SELECT name, sql FROM sqlite_master WHERE type = ? AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        tables, indexes = (dict(reader.execute(names, (kind,)).fetchall()) for kind in ("table", "index"))
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("BEGIN")
        for statement in [*tables.values(), *indexes.values()]:
            writer.execute(statement)
        for name in tables:
            table = '"' + name.replace('"', '""') + '"'
            for row in _rows(reader, table, lost):
                # What a damaged page gives may be no row of this table, or one that was there already.
                writer.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        writer.execute("COMMIT")
    return lost


def _rows(reader: sqlite3.Connection, table: str, lost: list[str]) -> Iterator[tuple[Any, ...]]:
    last = -(1 << 63)
    try:
        for row in reader.execute(f"SELECT rowid, * FROM {table} NOT INDEXED ORDER BY rowid"):
            last = row[0]
            yield row[1:]
    except sqlite3.DatabaseError:
        lost.append(table.strip('"'))
        back = f"SELECT * FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid DESC"
        with suppress(sqlite3.DatabaseError):
            yield from reader.execute(back, (last,))


def _checked(source: Path, made: Path) -> Mapping[str, Mapping[str, int]]:
    with closing(sqlite3.connect(made)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            found = " ".join(found.split())
            raise TunerError(f"the copy is as damaged as {source} ({found}), and was not kept; {way_out(source)}")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables >= {"studies", "trials"}:
            raise UsageError(f"wanted a database of Optuna's to copy, found another one at {source}; no copy was made")
        counts: dict[str, dict[str, int]] = {}
        for study, state, count in connection.execute(
            "SELECT study_name, lower(state), count(trial_id) FROM studies LEFT JOIN trials USING (study_id)"
            " GROUP BY study_name, state ORDER BY study_name"
        ):
            counts.setdefault(study, {}).update({"failed" if state == "fail" else state: count} if count else {})
        return counts
