"""A SQLite file as it lies on its disk: whether it is there and sound, and what of it can be mended.

Only SQLite opens the file (`tuner.storage_url` says why). What looks at it writes nothing into it, and a file that is
damaged is never written to: what can still be read of it is worth more than what a repair would guess.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tuner.errors import StorageError, TunerError
from tuner.storage_url import check_place

WAIT_SECONDS = 10.0
"""How long a look waits for a program that holds the file, in seconds."""

LARGE_LOG = 64_000_000
"""A write-ahead log of more bytes than these is not what SQLite leaves by itself (4 MB): something holds it back."""

LITTLE_ROOM = 64_000_000
"""With fewer free bytes than these, a run is about to wait for room."""

# What the index says is not what the table says, and nothing else: that an index can be made anew from its table. A
# damaged page of an index is not among them: to clear it, SQLite would follow its damaged links.
# https://www.sqlite.org/pragma.html#pragma_integrity_check
_INDEX_TROUBLE = re.compile(
    r"(row \d+ missing from index|wrong # of entries in index|row \d+ values differ from index"
    r"|rowid not at end-of-record for row \d+ of index) "
)

_UNCHANGING = "immutable=1"


@dataclass(frozen=True)
class Finding:
    """Something about a storage: what was found, and what to do.

    `code` names the kind of it, for programs. One that is not `wrong` is only said; one that is `mendable` is mended by
    ``--repair``.
    """

    code: str
    text: str
    answer: str = ""
    wrong: bool = True
    mendable: bool = False


@dataclass(frozen=True)
class FileState:
    """A SQLite file: sizes in bytes, its journal mode, the check it went through, and whether its content is sound."""

    bytes: int
    log_bytes: int
    free_bytes: int
    journal: str
    check: str
    sound: bool


def size_text(count: int) -> str:
    """Bytes as a person writes them: ``0.4 MB``, ``12.0 GB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def look(path: Path, *, damaged: bool = False) -> sqlite3.Connection:
    """A connection to a file that is there, which changes nothing in it. Raises sqlite3.Error.

    One to a file that is known to be `damaged` reads what it can, where otherwise the whole file is refused.
    """
    path = path.resolve()  # the log lies beside the file, not beside a link to it
    return _connect(path, _mode(path), damaged)


def _mode(path: Path) -> str:
    """How to open a file so that nothing is changed in it or left beside it."""
    if _may_write(path) and _may_write(path.parent):
        # The last to close a file for writing copies its log into it; one that may be damaged must not be changed so.
        # Where there is no log, one that reads only would leave an empty one behind.
        return "mode=ro" if log_bytes(path) else "mode=rw"
    if path.with_name(path.name + "-wal").exists():
        return "mode=ro"
    # To read a file with a log, SQLite makes the log if it is not there: here it cannot, or it would leave one that is
    # not its owner's to write. As there is none, nobody has the file open. Without locks it says that it cannot.
    try:
        _connect(path, "mode=ro&nolock=1").close()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:
            return _UNCHANGING
        raise
    return "mode=ro"


def _connect(path: Path, mode: str, damaged: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{mode}", uri=True, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA query_only = ON")
        if damaged:  # also a file that is shorter than it says
            connection.execute("PRAGMA writable_schema = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def inspect_file(path: Path, *, full: bool) -> tuple[FileState | None, list[Finding]]:
    """What is at `path`, and what is wrong with it; no state where there is no SQLite file that can be read.

    `full` compares every index with its table as well, which takes a multiple of the time.
    """
    findings = []
    try:
        check_place(path)
        kind = path.stat().st_mode
    except StorageError as error:
        findings.append(Finding("place", str(error)))
        kind = path.stat().st_mode if os.path.isfile(path) else 0
    except FileNotFoundError:
        return None, [Finding("missing", f"no file at {path}", "name another, or start a study: python -m tuner.run")]
    except OSError as error:
        return None, [Finding("place", f"{path}: {error.strerror}")]
    if not stat.S_ISREG(kind):
        return None, findings or [Finding("place", f"{path} is no regular file", "name another")]
    if not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
        return None, [*findings, Finding("permission", f"no permission to read {path}", f"see ls -l {path}")]
    for place in (path, path.resolve().parent):
        if not _may_write(place):
            why = "no study can go on here" if place == path else "SQLite makes its log beside the file"
            findings.append(Finding("permission", f"no permission to write {place}: {why}", f"see ls -ld {place}"))
    state, found = _inspect_content(path, full)
    return state, [*findings, *found]


def _inspect_content(path: Path, full: bool) -> tuple[FileState | None, list[Finding]]:
    check = "integrity_check" if full else "quick_check"
    size, log, free = path.stat().st_size, log_bytes(path.resolve()), shutil.disk_usage(path.resolve().parent).free
    try:
        mode = _mode(path.resolve())
        with closing(_connect(path.resolve(), mode)) as connection:
            (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
            journal = "wal" if mode == _UNCHANGING else journal  # it does not say so then
            # All of it: the first hundred lines may be about an index, and the next about a table.
            troubles = [text for (text,) in connection.execute(f"PRAGMA {check}(1000000)") if text != "ok"]
    except sqlite3.Error as error:
        return None, [_trouble(path, error)]
    findings = []
    if troubles:
        findings.append(_damage(path, troubles))
    if journal != "wal" and size:  # Nobody has begun an empty one.
        text = f"the journal mode is {journal}, not wal: readers and writers wait for each other"
        findings.append(Finding("journal", text, "a run switches it as well", mendable=True))
    if log > LARGE_LOG:
        text = f"its write-ahead log has grown to {size_text(log)}: a program reads it for long, or was killed"
        findings.append(Finding("log", text, mendable=True))
    if free < LITTLE_ROOM:
        findings.append(Finding("room", f"only {size_text(free)} are free on its disk", "make room"))
    elif free < size + log:
        text = f"{size_text(free)} are free on its disk, fewer than its own {size_text(size + log)}"
        findings.append(Finding("room", text, "copy it to another disk", wrong=False))
    sound = all(finding.code not in ("corrupt", "indexes") for finding in findings)
    return FileState(size, log, free, journal, check, sound), findings


def _damage(path: Path, troubles: list[str]) -> Finding:
    told = "; ".join(" ".join(text.split()) for text in troubles[:3]) + ("; ..." if len(troubles) > 3 else "")
    if all(_INDEX_TROUBLE.match(text) for text in troubles):
        text = f"indexes disagree with their tables in {len(troubles)} places: {told}"
        return Finding("indexes", text, mendable=True)
    return Finding("corrupt", f"the file is damaged: {told}", way_out(path))


def way_out(path: Path) -> str:
    """What to do with a damaged file."""
    new = path.with_name(f"{path.stem}-salvaged{path.suffix}")
    command = f"python -m tuner.check {shlex.quote(str(path))} --salvage {shlex.quote(str(new))}"
    return f"nothing is written to it; take the last copy, or what can still be read of it: {command}"


def _trouble(path: Path, error: sqlite3.Error) -> Finding:
    """Why the file could not be read through."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        return Finding("kind", f"{path} is no SQLite database", "name another; it is left as it is")
    if code == sqlite3.SQLITE_BUSY:
        return Finding("locked", f"another program has locked it for {WAIT_SECONDS:.0f} s", f"see fuser -v {path}")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
        return Finding("corrupt", f"the file is damaged: {error}", way_out(path))
    return Finding("reading", f"{path} cannot be read: {error}")


def _change(path: Path) -> sqlite3.Connection:
    """A connection to a file that is there."""
    uri = f"file:{quote(str(path))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=WAIT_SECONDS, isolation_level=None)


def mend_indexes(path: Path) -> str:
    """Make all indexes anew from their tables, or change nothing; what was done. Raises TunerError."""
    try:
        with closing(_change(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("REINDEX")
            found = [text for (text,) in connection.execute("PRAGMA integrity_check")]
            if found != ["ok"]:
                connection.execute("ROLLBACK")
                told = " ".join(found[0].split())
                raise TunerError(f"made the indexes of {path} anew, found: {told}; nothing was changed")
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise TunerError(f"wanted to make the indexes of {path} anew, found: {error}; nothing was changed") from error
    return "made the indexes anew"


def mend_journal(path: Path) -> str:
    """Switch to a write-ahead log, and write a large one into the file; what was done, or why not."""
    with closing(_change(path)) as connection:
        try:
            (before,) = connection.execute("PRAGMA journal_mode").fetchone()
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            return f"left the journal as it is: {error}; see fuser -v {path}"
    if busy:
        return f"left the write-ahead log as it is: a program reads it; see fuser -v {path}"
    if mode != before:
        return f"switched the journal from {before} to {mode}"
    return "wrote the write-ahead log into the file"


_EFFECTIVE = os.access in os.supports_effective_ids


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=_EFFECTIVE)


def log_bytes(path: Path) -> int:
    """The size of the write-ahead log beside a file, 0 where there is none."""
    log = path.with_name(path.name + "-wal")
    return log.stat().st_size if log.exists() else 0
