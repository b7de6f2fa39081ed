"""A storage: how it is named, what is refused, and that what is written comes back as it was."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from tuner.errors import StorageError
from tuner.storage import Storage, masked, open_storage, resolve_url, sqlite_path, start_lock
from tuner.storage_url import network_file_system, without_secrets

pytest_plugins = "postgres"

optuna.logging.set_verbosity(optuna.logging.WARNING)
SECRET = "s3cr3t"


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A new storage in each kind of database."""
    if request.param == "postgresql":
        opened = open_storage(request.getfixturevalue("postgres_url"))
    else:
        opened = open_storage(resolve_url("study.db", {}, tmp_path))
    yield opened
    opened.close()


def everything_in(directory: Path) -> dict[str, bytes | None]:
    """Each path under `directory` with its content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def refusal_of(text: str, directory: Path, *, create: bool = True) -> str:
    """The one line with which opening `text` is refused; asserts that it left nothing behind."""
    before = everything_in(directory)
    with pytest.raises(StorageError) as found:
        open_storage(resolve_url(text, {}, directory), create=create)
    assert everything_in(directory) == before
    message = str(found.value)
    assert "\n" not in message
    assert message.startswith("wanted ")
    assert "found" in message
    assert ";" in message
    assert found.value.exit_code == 2
    return message


# Names.


@pytest.mark.parametrize(
    ("text", "environ", "url"),
    [
        (None, {}, "sqlite:////home/me/tuner.db"),
        (None, {"OPTUNA_STORAGE": ""}, "sqlite:////home/me/tuner.db"),
        (None, {"OPTUNA_STORAGE": "sqlite:///other.db"}, "sqlite:////home/me/other.db"),
        ("mine.db", {"OPTUNA_STORAGE": "sqlite:///other.db"}, "sqlite:////home/me/mine.db"),
        ("../a/b.db", {}, "sqlite:////home/a/b.db"),
        ("/data/b.db", {}, "sqlite:////data/b.db"),
        ("sqlite:////data/b.db", {}, "sqlite:////data/b.db"),
        ("sqlite+pysqlite:///b.db", {}, "sqlite:////home/me/b.db"),
        ("sqlite:///a%20b.db", {}, "sqlite:////home/me/a b.db"),
        ("a%20b.db", {}, "sqlite:////home/me/a%2520b.db"),
        ("a?{b}#é.db", {}, "sqlite:////home/me/a%3F%7Bb%7D#é.db"),
        ("postgresql://u:p@h/d", {}, "postgresql+psycopg://u:p@h/d"),
        ("postgres://h/d", {}, "postgresql+psycopg://h/d"),
        ("postgresql+psycopg://h/d", {}, "postgresql+psycopg://h/d"),
    ],
)
def test_a_path_or_url_has_one_canonical_name(text: str | None, environ: dict[str, str], url: str) -> None:
    """A path is a SQLite file, relative to the working directory; the argument beats OPTUNA_STORAGE."""
    assert resolve_url(text, environ, Path("/home/me")) == url
    assert resolve_url(url, {}, Path("/elsewhere")) == url


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty name"),
        ("sqlite://", "processes can share"),
        ("sqlite:///", "processes can share"),
        ("sqlite:///:memory:", "processes can share"),
        ("sqlite:///file::memory:?cache=shared&uri=true", "without options"),
        ("sqlite:///file:x?mode=memory&uri=true", "processes can share"),
        ("sqlite:///study.db?timeout=3", "without options"),
        ("sqlite://study.db", "count the slashes"),
        ("sqlite://me:s3cr3t@host/study.db", "count the slashes"),
        ("mysql://u:s3cr3t@h/d", "SQLite or PostgreSQL"),
        ("redis://:s3cr3t@h", "SQLite or PostgreSQL"),
        ("https://example.com", "SQLite or PostgreSQL"),
        ("a\0b.db", "printable"),
        ("a\nb.db", "printable"),
        ("a\udcffb.db", "UTF-8"),
    ],
)
def test_a_name_that_cannot_be_shared_is_refused(text: str, part: str, tmp_path: Path) -> None:
    """In memory, another kind of server, options that would be ignored: one line each, without a password."""
    message = refusal_of(text, tmp_path)
    assert part in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "name",
    [
        *("a{b}.db", "{SCHEMA_VERSION}.db", "a{.db", "a?b=c.db", "a%20b.db", "a%.db", "a#b.db", "a b.db", "größe.db"),
        *("a'b\"c.db", "a;b&c.db", "a+b.db", "a@b:c.db", ":memory:", "file:x.db", "~.db", "数", "a\\b.db"),
    ],
)
def test_a_path_opens_exactly_that_file(name: str, tmp_path: Path) -> None:
    """Optuna formats the URL and SQLAlchemy parses it: `{`, `?` and `%20` opened other files, or none."""
    url = resolve_url(str(tmp_path / name), {}, tmp_path)
    assert sqlite_path(url) == tmp_path / name
    storage = open_storage(url)
    optuna.create_study(storage=storage, study_name="here")
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    again = optuna.storages.RDBStorage(url.replace("{", "{{").replace("}", "}}"))
    assert [study.study_name for study in again.get_all_studies()] == ["here"]
    again.engine.dispose()


def test_a_link_leads_to_its_file(tmp_path: Path) -> None:
    """A link to a database, or to nothing yet, is the database it leads to."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "study.db")
    open_storage(resolve_url("link.db", {}, tmp_path)).close()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["study.db"]
    open_storage(resolve_url("real/study.db", {}, tmp_path), create=False).close()


# Refusals.


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    """Optuna says "unable to open database file"; here the directory is named, with the command that makes it."""
    assert f"mkdir -p {tmp_path}/no/where" in refusal_of("no/where/study.db", tmp_path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    """With the path that was probably meant."""
    (tmp_path / "studies").mkdir()
    assert f"try {tmp_path}/studies/tuner.db" in refusal_of("studies", tmp_path)


def test_a_missing_file_is_refused_where_nothing_may_be_made(tmp_path: Path) -> None:
    """`report` and `dashboard` make no empty file of a mistyped name."""
    assert "no such file" in refusal_of("study.db", tmp_path, create=False)


@pytest.mark.parametrize(
    "content",
    [b"not a database, but text\n" * 50, random.Random(0).randbytes(5000), b"SQLite format 3", b"\0" * 4096],
    ids=["text", "noise", "short", "zeros"],
)
def test_a_file_of_another_kind_is_refused_untouched(content: bytes, tmp_path: Path) -> None:
    """Nothing is written into somebody's file."""
    (tmp_path / "study.db").write_bytes(content)
    assert "another kind of file" in refusal_of("study.db", tmp_path)


@pytest.mark.parametrize("keep", ["header", "half", "schema"])
def test_a_damaged_database_is_refused_untouched(keep: str, tmp_path: Path) -> None:
    """Cut off, or overwritten after its first bytes."""
    path = tmp_path / "study.db"
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = optuna.create_study(storage=storage)
    for number in range(50):
        study.enqueue_trial({"x": number})
    storage.close()
    whole = path.read_bytes()
    noise = random.Random(0).randbytes(len(whole))
    path.write_bytes(
        {
            "header": whole[:16] + noise[16:],
            "half": whole[: len(whole) // 2],
            "schema": whole[:100] + noise[100:4096] + whole[4096:],
        }[keep]
    )
    assert "damaged" in refusal_of("study.db", tmp_path)


def test_a_database_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    """Optuna would add its tables to it."""
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE customers (name TEXT)")
        connection.execute("CREATE TABLE studies (id INTEGER)")
        connection.commit()
    assert "another program" in refusal_of("study.db", tmp_path)


@pytest.mark.parametrize("stamp", ["v3.0.0.a", "v9.9.9.z"], ids=["older", "newer"])
def test_tables_of_another_optuna_are_refused_untouched(stamp: str, tmp_path: Path) -> None:
    """With the command that upgrades them."""
    open_storage(resolve_url("study.db", {}, tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (stamp,))
        connection.commit()
    message = refusal_of("study.db", tmp_path)
    assert f"optuna storage upgrade --storage 'sqlite:///{tmp_path}/study.db'" in message


def test_tables_of_another_optuna_on_a_server_are_refused(postgres_url: str) -> None:
    """The same on PostgreSQL."""
    import psycopg

    open_storage(postgres_url).close()
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v3.0.0.a'")
    with pytest.raises(StorageError, match="optuna storage upgrade"):
        open_storage(postgres_url)


def test_a_pipe_or_a_socket_is_refused(tmp_path: Path) -> None:
    """Reading a pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(StorageError, match="regular file"):
        open_storage(resolve_url("pipe.db", {}, tmp_path))
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short}/s")
        with pytest.raises(StorageError, match="regular file"):
            open_storage(resolve_url(f"{short}/s", {}, tmp_path))


@pytest.fixture
def nobodys_directory() -> Iterator[Path]:
    """A directory that everybody can reach."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may do everything: become somebody who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused(nobodys_directory: Path, request: pytest.FixtureRequest) -> None:
    """The write-ahead log lies beside the file."""
    nobodys_directory.chmod(0o555)
    request.getfixturevalue("nobody")
    assert "no permission" in refusal_of("study.db", nobodys_directory)


def test_a_file_that_cannot_be_written_is_refused(nobodys_directory: Path, request: pytest.FixtureRequest) -> None:
    """Before a trial is trained for nothing."""
    open_storage(resolve_url("study.db", {}, nobodys_directory)).close()
    (nobodys_directory / "study.db").chmod(0o444)
    nobodys_directory.chmod(0o777)
    request.getfixturevalue("nobody")
    assert "no permission" in refusal_of("study.db", nobodys_directory)


def test_an_empty_file_and_an_interrupted_creation_are_completed(tmp_path: Path) -> None:
    """What a process leaves that was killed while it made the tables is no damage."""
    path = tmp_path / "study.db"
    path.touch()
    open_storage(resolve_url("study.db", {}, tmp_path)).close()
    with closing(sqlite3.connect(path)) as connection:
        for table in ("alembic_version", "version_info", "trial_values"):
            connection.execute(f"DROP TABLE {table}")
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = optuna.create_study(storage=storage)
    study.tell(study.ask(), 1.0)
    assert study.best_value == 1.0
    storage.close()


def test_a_study_of_a_plain_optuna_script_is_opened(tmp_path: Path) -> None:
    """And the script reads on what is added here."""
    plain = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    study = optuna.create_study(storage=plain, study_name="plain")
    study.tell(study.ask(), 3.0)
    storage = open_storage(resolve_url("study.db", {}, tmp_path), create=False)
    here = optuna.load_study(storage=storage, study_name="plain")
    assert here.best_value == 3.0
    here.tell(here.ask(), 2.0)
    assert study.best_value == 2.0
    storage.close()
    plain.engine.dispose()


# Network file systems.

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
24 23 0:21 / /home/me/local rw - xfs /dev/sdb1 rw
25 22 0:22 / /mnt/with\040space rw - cifs //server/share rw
26 22 0:23 / /far rw - fuse.sshfs me@host: rw
27 22 0:24 / /near rw - fuse.mergerfs /disk rw
28 22 0:25 / /scratch rw - lustre mgs:/scratch rw
29 22 0:26 / /auto rw - autofs /etc/auto rw
30 29 0:27 / /auto rw - nfs server:/auto rw
31 22 0:28 / /windows rw - 9p drvfs rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/", ""),
        ("/tmp", ""),
        ("/home", "nfs4"),
        ("/home/me", "nfs4"),
        ("/home/me/local", ""),
        ("/home/me/local/deep", ""),
        ("/home/me/locality", "nfs4"),
        ("/homestead", ""),
        ("/mnt/with space/x", "cifs"),
        ("/far/x", "fuse.sshfs"),
        ("/near/x", ""),
        ("/scratch/x", "lustre"),
        ("/auto/x", "nfs"),
        ("/windows/c", "9p"),
    ],
)
def test_a_network_file_system_is_known_by_the_longest_mount(directory: str, kind: str, tmp_path: Path) -> None:
    """Optuna 815, 1300: malformed files on a cluster's file system, which SQLite's locks do not protect."""
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert network_file_system(Path(directory), tmp_path / "mountinfo") == kind


def test_the_root_of_a_sandbox_is_local(tmp_path: Path) -> None:
    """gVisor shows the disk of its own host as 9p; that is the only place where 9p may be."""
    (tmp_path / "mountinfo").write_text("1 0 0:1 / / rw - 9p none rw,trans=fd\n")
    assert network_file_system(Path("/home/me"), tmp_path / "mountinfo") == ""


def test_a_storage_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason and the way out, before anything is written."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n")
    found = network_file_system
    monkeypatch.setattr("tuner.storage_url.network_file_system", lambda directory: found(directory, mountinfo))
    message = refusal_of("study.db", tmp_path)
    assert "network file system (nfs4)" in message
    assert "PostgreSQL" in message


def test_this_machines_directories_are_recognized(tmp_path: Path) -> None:
    """The real list of mounts is read, or none is there: no error either way."""
    assert network_file_system(tmp_path) == network_file_system(tmp_path / "deeper")
    assert network_file_system(tmp_path, tmp_path / "no-such-list") == ""


# Passwords.


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://me:s3cr3t@host:5432/db", "postgresql+psycopg://me:***@host:5432/db"),
        ("postgresql+psycopg://me:s3cr3t@evil@host/db", "postgresql+psycopg://me:***@host/db"),
        ("postgresql+psycopg://me:s3c/r3t?x@host/db", "postgresql+psycopg://me:***@host/db"),
        ("postgresql+psycopg://me@host/db", "postgresql+psycopg://me@host/db"),
        ("postgresql+psycopg:///db?host=/run&password=s3cr3t", "postgresql+psycopg:///db?host=/run&password=***"),
        ("postgresql+psycopg://h/d?sslpassword=s3cr3t&x=1", "postgresql+psycopg://h/d?sslpassword=***&x=1"),
        ("redis://:s3cr3t@host", "redis://:***@host"),
        ("sqlite:////a:b@c.db", "sqlite:////a:b@c.db"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    """Wherever it stands in the URL."""
    assert masked(url) == shown


@pytest.mark.parametrize("raw", ["s3cr3t{0}", "s3cr3t%7B0%7D", "s3cr3t%40%2F"])
def test_a_failing_connection_shows_no_password(raw: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the error, nor what it came from, nor the log; braces are no format of Optuna's."""
    url = resolve_url(f"postgresql://me:{raw}@127.0.0.1:9/db", {}, Path("/"))
    with pytest.raises(StorageError) as found:
        open_storage(url)
    assert "127.0.0.1" in str(found.value)
    assert "\n" not in str(found.value)
    assert found.value.__suppress_context__
    assert SECRET not in str(found.value) + caplog.text
    assert without_secrets(f"bad {raw} here\nmore", url) == "bad *** here"


def test_an_unusable_url_is_one_line(tmp_path: Path) -> None:
    """A port that is no number, a driver that is not installed."""
    for text in ("postgresql://me:s3cr3t@host:port/db", "postgresql+nodriver://me:s3cr3t@host/db"):
        assert SECRET not in refusal_of(text, tmp_path)


def test_a_storage_does_not_show_its_password(postgres_url: str) -> None:
    """`repr` is what a debugger, a log and a traceback show."""
    url = postgres_url.replace("postgres:@", f"postgres:{SECRET}@")
    assert SECRET in url
    storage = open_storage(url)
    assert SECRET not in repr(storage)
    assert "***" in repr(storage)
    storage.close()


# Writing and reading.


def doubles() -> list[float]:
    """1,000 finite doubles of all magnitudes, the extreme ones among them."""
    chosen = [0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, sys.float_info.max, -sys.float_info.max, 0.1]
    generator = random.Random(7)
    while len(chosen) < 1000:
        (value,) = struct.unpack("<d", generator.randbytes(8))
        if math.isfinite(value):
            chosen.append(value)
    return chosen


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


def kept(storage: Storage, values: list[float]) -> list[float]:
    """SQLite stores a real number without a fraction as an integer, so its zero has no sign."""
    return [value + 0.0 for value in values] if storage.engine.name == "sqlite" else values


def test_a_thousand_doubles_come_back_bit_equal(storage: Storage) -> None:
    """Optuna 3227: lost digits. As reports, as attributes and as a value."""
    study = optuna.create_study(storage=storage)
    values = doubles()
    trial = study.ask()
    storage.record(trial._trial_id, attributes={"doubles": values}, reports=dict(enumerate(values)))
    back = study.trials[0]
    assert bits([back.intermediate_values[step] for step in range(1000)]) == bits(kept(storage, values))
    assert bits(back.user_attrs["doubles"]) == bits(values)
    for value in values[:8]:
        trial = study.ask()
        storage.record(trial._trial_id, state=TrialState.COMPLETE, values=[value])
        assert bits(study.trials[-1].values) == bits(kept(storage, [value]))


def test_parameters_come_back_bit_equal(storage: Storage) -> None:
    """Through Optuna's own way of writing them."""
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    trial = study.ask()
    chosen = {f"x{n}": trial.suggest_float(f"x{n}", 1e-300, 1e300, log=True) for n in range(20)}
    back = storage.get_trial(trial._trial_id).params
    assert bits(list(back.values())) == bits(list(chosen.values()))


def test_a_record_is_read_at_once_through_optunas_cache(storage: Storage) -> None:
    """The cache in front of a storage rereads a trial that it knows as running."""
    storage.owner = "me"
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    assert study.trials[0].state == TrialState.RUNNING
    assert study.trials[0].user_attrs == {"worker": "me"}
    storage.record(trial._trial_id, attributes={"a": 1}, reports={0: 0.5, 1: math.nan, 2: math.inf})
    assert study.trials[0].user_attrs == {"worker": "me", "a": 1}
    assert study.trials[0].state == TrialState.RUNNING
    storage.record(trial._trial_id, attributes={"a": 2, "b": "é"}, state=TrialState.COMPLETE, values=[0.25])
    done = study.trials[0]
    assert repr(done) == repr(storage.get_trial(trial._trial_id))
    assert (done.state, done.values, done.user_attrs) == (
        TrialState.COMPLETE,
        [0.25],
        {"worker": "me", "a": 2, "b": "é"},
    )
    assert (done.intermediate_values[0], done.intermediate_values[2]) == (0.5, math.inf)
    assert math.isnan(done.intermediate_values[1])
    assert done.datetime_complete is not None
    assert study.best_value == 0.25


def test_a_record_is_all_or_nothing(storage: Storage) -> None:
    """An attribute that is no JSON: no report is written either, and the trial goes on."""
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    with pytest.raises(TypeError):
        storage.record(trial._trial_id, attributes={"a": 1, "b": object()}, reports={0: 1.0}, state=TrialState.FAIL)
    assert (study.trials[0].state, study.trials[0].user_attrs) == (TrialState.RUNNING, {})
    assert study.trials[0].intermediate_values == {}


def test_a_finished_trial_cannot_be_recorded_again(storage: Storage) -> None:
    """And keeps what it has; an unknown one is a KeyError, as in Optuna."""
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    storage.record(trial._trial_id, state=TrialState.PRUNED, reports={0: 2.0})
    with pytest.raises(UpdateFinishedTrialError):
        storage.record(trial._trial_id, attributes={"late": 1})
    with pytest.raises(UpdateFinishedTrialError):
        storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    assert (study.trials[0].state, study.trials[0].user_attrs) == (TrialState.PRUNED, {})
    with pytest.raises(KeyError):
        storage.record(10**6, attributes={"a": 1})


def test_several_objectives_are_recorded(storage: Storage) -> None:
    """In their order, infinities as Optuna writes them."""
    study = optuna.create_study(storage=storage, directions=["minimize", "maximize"])
    trial = study.ask()
    storage.record(trial._trial_id, state=TrialState.COMPLETE, values=[1.0, -math.inf])
    assert study.trials[0].values == [1.0, -math.inf]


def test_a_copied_storage_is_a_whole_one(storage: Storage) -> None:
    """Optuna's own restoring forgets how transactions begin; this one opens the URL again, with owner and budget."""
    storage.owner, storage.total_limit = "me", 7
    for restored in (pickle.loads(pickle.dumps(storage)), copy.deepcopy(storage)):
        assert (restored.given_url, restored.owner, restored.total_limit) == (storage.given_url, "me", 7)
        study = optuna.create_study(storage=restored)
        study.tell(study.ask(), 1.0)
        assert study.trials[0].user_attrs == {"worker": "me"}
        if restored.engine.name == "sqlite":
            with closing(restored.engine.raw_connection()) as connection:
                assert connection.cursor().execute("PRAGMA synchronous").fetchone() == (2,)
        restored.close()


def test_a_sqlite_storage_keeps_a_write_ahead_log_and_waits(tmp_path: Path) -> None:
    """So that readers and writers do not hinder each other, and what was told survives a power cut."""
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    with closing(storage.engine.raw_connection()) as connection:
        cursor = connection.cursor()
        found = {
            name: cursor.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 120_000}
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


def test_what_writes_takes_the_lock_before_it_reads(tmp_path: Path) -> None:
    """What it has read is then still true when it writes. What only reads takes no lock."""
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    study.enqueue_trial({"x": 1})
    trial_id, said = trial._trial_id, list[str]()
    with closing(storage.engine.raw_connection()) as connection:
        connection.driver_connection.set_trace_callback(said.append)
    distribution = optuna.distributions.FloatDistribution(0, 1)
    for writes in (
        lambda: storage.create_new_trial(study._study_id),
        lambda: storage.set_trial_param(trial_id, "x", 0.5, distribution),
        lambda: storage.set_trial_intermediate_value(trial_id, 0, 0.5),
        lambda: storage.set_trial_user_attr(trial_id, "a", 1),
        lambda: storage.set_trial_system_attr(trial_id, "a", 1),
        lambda: storage.set_study_user_attr(study._study_id, "a", 1),
        lambda: storage.set_study_system_attr(study._study_id, "a", 1),
        lambda: storage.record_heartbeat(trial_id),
        lambda: storage.fail_trials_of(study._study_id, "me", "gone"),
        lambda: storage.set_trial_state_values(trial_id + 1, TrialState.RUNNING),
        lambda: storage.set_trial_state_values(trial_id + 1, TrialState.FAIL),
        lambda: storage.record(trial_id, state=TrialState.PRUNED),
        lambda: storage.create_new_study([optuna.study.StudyDirection.MINIMIZE]),
        lambda: storage.delete_study(study._study_id + 1),
    ):
        said.clear()
        writes()
        assert said[0] == "BEGIN IMMEDIATE"
    for read in (
        lambda: storage.get_all_trials(study._study_id),
        lambda: storage.get_trial(trial_id),
        lambda: storage.get_trial_params(trial_id),
        lambda: storage.get_trial_user_attrs(trial_id),
        lambda: storage.get_trial_system_attrs(trial_id),
        lambda: storage.get_trial_id_from_study_id_trial_number(study._study_id, 0),
        lambda: storage.get_trial_number_from_id(trial_id),
        lambda: storage.get_n_trials(study._study_id),
        storage.get_all_studies,
        lambda: storage.get_study_user_attrs(study._study_id),
        lambda: storage.get_study_system_attrs(study._study_id),
        lambda: storage.get_study_directions(study._study_id),
        lambda: storage.get_study_id_from_name(study.study_name),
        lambda: storage.get_study_name_from_id(study._study_id),
        lambda: storage.finished_count(study._study_id),
    ):
        said.clear()
        read()
        assert "BEGIN" in said
        assert "BEGIN IMMEDIATE" not in said
    storage.close()


def test_a_process_leaves_no_log_beside_the_file(tmp_path: Path) -> None:
    """Also one that never calls `close`: a copy of study.db is then the whole study."""
    code = f"""
import optuna
from pathlib import Path
from tuner.storage import open_storage, resolve_url
study = optuna.create_study(storage=open_storage(resolve_url("study.db", {{}}, Path({str(tmp_path)!r}))))
study.tell(study.ask(), 1.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


def test_the_start_lock_can_be_taken_twice_by_its_holder(storage: Storage) -> None:
    """Opening a storage inside of it, to make a study, does not wait for itself."""
    with start_lock(storage.given_url), start_lock(storage.given_url):
        open_storage(storage.given_url).close()


def test_importing_the_storage_loads_neither_torch_nor_sqlalchemy() -> None:
    """`--help` and the dashboard stay quick."""
    code = "import sys, tuner.storage; print(sorted({'torch', 'sqlalchemy', 'alembic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
