"""Where a study is kept: read the name of a storage, refuse what cannot work before anything is made, and take turns.

Nothing here knows Optuna. A storage is named by one canonical URL: ``sqlite:////absolute/path`` or
``postgresql+psycopg://...``. Characters of a path that SQLAlchemy (``?``, ``%``) or Optuna (``{``, ``}``: it calls
``str.format`` on the URL) would read as something else are percent-encoded in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

from tuner.errors import StorageError

BUSY_SECONDS = 120.0
"""How long a process waits for others before it gives up, in seconds."""

# Write-ahead logging needs memory that all processes share, and locks that hold: file systems over a network have
# neither (https://www.sqlite.org/wal.html, https://www.sqlite.org/howtocorrupt.html, section 2).
_NETWORK_FILE_SYSTEMS = (
    *("9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "gfs", "gfs2", "glusterfs"),
    *("gpfs", "lustre", "mmfs", "moosefs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2"),
    *("smb3", "smbfs", "vboxsf", "wekafs"),
)
_NETWORK_FUSE = ("sshfs", "gluster", "ceph", "moosefs", "mfs", "lizardfs", "s3", "gcs", "rclone", "goofys", "juicefs")
_ANSWER = "give the path of a local file, or a PostgreSQL URL (postgresql://USER@HOST/DATABASE)"
STUDY_TABLES = frozenset({"studies", "trials", "version_info"})
OPTUNA_TABLE = re.compile(r"(alembic_version|version_info|studies|trials|(study|trial)_[a-z_]+)$")

_held = threading.local()


def resolve_url(text: str | None, environ: Mapping[str, str], cwd: Path) -> str:
    """The canonical URL of what a user named.

    `text` is a path, a URL or None (then ``OPTUNA_STORAGE``, then ``tuner.db`` in `cwd`). Relative paths are relative
    to `cwd`. Raises StorageError for a URL that cannot be a shared storage. Touches no file.
    """
    if text is None:
        text = environ.get("OPTUNA_STORAGE") or "tuner.db"
    if not text.strip():
        raise StorageError(f"wanted a storage, found an empty name; {_ANSWER}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _sqlite_url(Path(text), cwd)
    if scheme in ("sqlite", "sqlite+pysqlite"):
        return _sqlite_url(_path_of(text, rest), cwd)
    if scheme in ("postgresql", "postgres"):
        return f"postgresql+psycopg://{rest}"
    if scheme.startswith("postgresql+"):
        return text
    raise StorageError(f"wanted a storage in SQLite or PostgreSQL, found {masked(text)}; {_ANSWER}")


def _path_of(text: str, rest: str) -> Path:
    """The path in ``sqlite:///PATH``, given what follows ``://``."""
    if rest in ("", "/") or rest.startswith("/:memory:") or "mode=memory" in rest:
        raise StorageError(f"wanted a storage that processes can share, found {text} (memory of one); {_ANSWER}")
    if not rest.startswith("/"):
        raise StorageError(
            f"wanted sqlite:///local.db or sqlite:////absolute.db, found {masked(text)} (count the slashes); {_ANSWER}"
        )
    if "?" in rest:
        raise StorageError(f"wanted a SQLite URL without options, found {text}; a ? in a file's name is written %3F")
    return Path(unquote(rest[1:]))


def _sqlite_url(path: Path, cwd: Path) -> str:
    absolute = os.path.abspath(cwd / path)  # not resolved: a link keeps the name that its user gave it
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise StorageError(f"wanted a path in UTF-8, found {absolute!r}; give the file another name") from None
    if not absolute.isprintable():
        raise StorageError(f"wanted a path of printable characters, found {absolute!r}; give the file another name")
    return "sqlite:///" + re.sub(r"[%?{}]", lambda found: f"%{ord(found[0]):02X}", absolute)


def sqlite_path(url: str) -> Path | None:
    """The file of a canonical SQLite URL, None for PostgreSQL."""
    return Path(unquote(url.removeprefix("sqlite:///"))) if url.startswith("sqlite:///") else None


def identity(url: str) -> tuple[int, int] | None:
    """Device and inode of a SQLite file, if it is there."""
    path = sqlite_path(url)
    try:
        found = os.stat(path) if path is not None else None
    except FileNotFoundError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def masked(url: str) -> str:
    """`url` for people to read: ``***`` in the place of a password."""
    if url.startswith(("sqlite:///", "sqlite+pysqlite:///")):
        return url
    url = re.sub(r"(://[^:/?@]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&][a-z]*password=)[^&]*", r"\1***", url)


def without_secrets(text: str, url: str) -> str:
    """The first line of `text` (an error of a driver), without the password of `url`."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    for found in re.findall(r"://[^:/?@]*:(.*)@|[?&][a-z]*password=([^&]*)", url):
        for secret in filter(None, found):
            line = line.replace(secret, "***").replace(unquote(secret), "***")
    return line


@contextmanager
def start_lock(url: str) -> Iterator[None]:
    """Hold the storage's start lock: one process at a time makes tables or a study. A thread may take it twice.

    For SQLite it is a kernel lock (flock) on the *directory* of the database: it leaves no file behind, ends with its
    process, and is the same for every user, temporary directory and container. For PostgreSQL it is an advisory lock on
    a connection of its own. Raises StorageError if it cannot be had within BUSY_SECONDS.
    """
    held: set[str] = _held.__dict__.setdefault("urls", set())
    if url in held:
        yield
        return
    path = sqlite_path(url)
    with _directory_lock(path) if path is not None else _advisory_lock(url):
        held.add(url)
        try:
            yield
        finally:
            held.discard(url)


@contextmanager
def _directory_lock(path: Path) -> Iterator[None]:
    check_place(path)
    directory = path.resolve().parent
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(f"wanted to read the directory of {path}, found: {error.strerror}; {_ANSWER}") from None
    try:
        deadline = time.monotonic() + BUSY_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"wanted to open {path}, found {directory} locked by another process for {BUSY_SECONDS:.0f} s;"
                    f" find it with: fuser -v {directory}"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _advisory_lock(url: str) -> Iterator[None]:
    import sqlalchemy

    key = int.from_bytes(hashlib.sha256(b"tuner start lock").digest()[:8], signed=True)
    with ExitStack() as stack:
        try:
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, isolation_level="AUTOCOMMIT")
            connection = stack.enter_context(engine.connect())  # the lock ends with its connection
            connection.exec_driver_sql(f"SET lock_timeout = '{BUSY_SECONDS:.0f}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_lock({key})")
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, ValueError) as error:
            raise cannot_open(url, error) from None
        yield


def cannot_open(url: str, error: Exception) -> StorageError:
    """`error`, met while opening `url`, as one line without its password."""
    if isinstance(error, ImportError):
        reason, answer = f"its driver is not installed ({error})", "pip install 'psycopg[binary]'"
    else:
        reason = without_secrets(str(getattr(error, "orig", None) or error), url)
        answer = "check the URL" if sqlite_path(url) is None else _ANSWER
        if "malformed" in reason:
            answer = "python -m tuner.check says what is wrong, and copies what can be read"
    return StorageError(f"wanted to open the storage {masked(url)}, found: {reason}; {answer}")


def check_place(path: Path) -> None:
    """Raise StorageError unless a database can live at `path`: its directory exists, and is not on a network."""
    try:
        is_directory = path.is_dir()
        directory = path.resolve().parent
        has_directory = directory.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise StorageError(f"wanted a storage at {path}, found: {error}; {_ANSWER}") from None
    if is_directory:
        raise StorageError(f"wanted a file for the storage, found the directory {path}; try {path / 'tuner.db'}")
    if not has_directory:
        raise StorageError(f"wanted an existing directory for {path}, found none; make it with: mkdir -p {directory}")
    kind = network_file_system(directory)
    if kind:
        raise StorageError(
            f"wanted a local disk for {path}, found a network file system ({kind}), on which SQLite's locks fail and"
            f" the file is damaged; {_ANSWER}"
        )


def network_file_system(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the network file system that the absolute `directory` is on; "" if it is local or unknown."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""  # no such list on this system
    longest, kind = -1, ""
    for line in lines:
        # See proc(5): the fifth field is the mount point; after " - " comes the type.
        fields, _, rest = line.partition(" - ")
        if len(fields.split(" ")) < 5 or not rest:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields.split(" ")[4])
        # A later mount on the same point hides the earlier one.
        if (directory == Path(mount) or Path(mount) in directory.parents) and len(mount) >= longest:
            longest, kind = len(mount), rest.split(" ")[0]
    if kind == "9p" and longest == 1:
        return ""  # the root of a sandbox (gVisor) is served by its own host
    name = kind.removeprefix("fuse.").removeprefix("fuseblk.")
    far = name in _NETWORK_FILE_SYSTEMS or (kind.startswith("fuse") and any(part in name for part in _NETWORK_FUSE))
    return kind if far else ""


def check_file(path: Path, *, create: bool) -> None:
    """Raise StorageError unless `path` is a database of Optuna's, or nothing yet and `create`. Makes nothing."""
    directory = path.resolve().parent
    # The write-ahead log lies beside the file.
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StorageError(f"wanted to write in {directory}, found no permission; {_ANSWER}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not create:
            raise StorageError(
                f"wanted a storage at {path}, found no such file; start a study, or name another"
            ) from None
    except OSError as error:
        raise StorageError(f"wanted a storage at {path}, found: {error.strerror}; {_ANSWER}") from None
    else:
        if not stat.S_ISREG(mode):
            raise StorageError(f"wanted a regular file for the storage, found another kind at {path}; {_ANSWER}")
        _check_content(path)


def _check_content(path: Path) -> None:
    # Only SQLite may open the file: closing it in any other way drops the locks that this process holds on it, and then
    # others remove a write-ahead log that is in use (https://www.sqlite.org/howtocorrupt.html, 2.2).
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StorageError(f"wanted to read and write {path}, found no permission; {_ANSWER}")
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables >= STUDY_TABLES:
                connection.execute("SELECT max(study_id), max(trial_id) FROM trials").fetchone()
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
            raise StorageError(f"wanted a SQLite database, found another kind of file at {path}; {_ANSWER}") from None
        raise StorageError(f"wanted a SQLite database, found a damaged one at {path} ({error}); {_ANSWER}") from None
    # A creation that was interrupted leaves some of Optuna's tables and no others: it is completed.
    if not tables >= STUDY_TABLES and not all(OPTUNA_TABLE.match(name) for name in tables):
        raise StorageError(
            f"wanted a database of Optuna's, found one of another program at {path}"
            f" (tables {', '.join(sorted(tables)[:3])}); {_ANSWER}"
        )
