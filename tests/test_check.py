"""`python -m tuner.check`: real files in every state that users have had them in, mended and copied."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages._rdb import models
from optuna.trial import TrialState

from tests.study_files import SLOW, end_group, finish, params_of, running, start, study_file, trials, wait_for
from tuner import check, health, sqlite_file
from tuner.owner import this_process
from tuner.storage import Storage, open_storage, resolve_url
from tuner.storage_schema import schema_versions
from tuner.weights import WeightsFolder

pytest_plugins = "postgres"

optuna.logging.set_verbosity(optuna.logging.WARNING)

GONE = f"{socket.gethostname()}:{2**22 + 1}:1"
"""An owner on this host: a process with a number above the largest that Linux gives."""


def fill(storage: Storage, name: str = "tiny", complete: int = 3) -> optuna.Study:
    """A study with trials that are complete, each with a parameter, an attribute and two reports."""
    study = optuna.create_study(storage=storage, study_name=name)
    storage.owner = this_process()
    for number in range(complete):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        values = {0: 1.0, 1: number + 0.5}
        storage.record(trial._trial_id, attributes={"epochs": 2}, reports=values, state=TrialState.COMPLETE, values=[1])
    return study


@pytest.fixture
def path(cwd: Path) -> Path:
    """``tuner.db`` in the working directory, with a study of three complete trials."""
    storage = open_storage(resolve_url(None, {}, cwd))
    fill(storage)
    storage.close()
    return cwd / "tuner.db"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command without the machine's part."""
    capsys.readouterr()
    code = check.main(["--storage-only", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def codes(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[str]]:
    """Exit code, and the codes of what is wrong."""
    code, out, _ = run(capsys, "--json", *arguments)
    return code, [finding["code"] for finding in json.loads(out)["storage"]["findings"] if finding["wrong"]]


def execute(path: Path, *statements: str) -> None:
    """Change a database behind everybody's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def everything_in(directory: Path) -> dict[str, bytes | None]:
    """Each path under `directory` with its content; no connection to any of them may be open here."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))}


# Healthy.


def test_a_healthy_storage_is_said_to_be_healthy(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0; what is in it; nothing about it is changed, and nothing is left beside it."""
    before = everything_in(path.parent)
    code, out, errors = run(capsys)
    assert (code, errors) == (0, f"checking sqlite:///{path}\n")
    lines = out.splitlines()
    assert lines[0] == f"storage    sqlite:///{path}"
    assert re.fullmatch(r"file       0\.1 MB; [\d.]+ [MG]B free on its disk", lines[1])
    assert lines[2:] == [
        "journal    wal",
        "content    sound (quick_check)",
        f"schema     {schema_versions()[0]}",
        "study      tiny: 3 complete, 0 pruned, 0 failed, 0 running, 0 waiting",
        "verdict    healthy",
    ]
    assert everything_in(path.parent) == before
    assert run(capsys, "--full")[0] == 0
    assert run(capsys, "--repair")[0] == 0
    assert everything_in(path.parent) == before


def test_the_document_has_everything(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one document with the same keys whatever is wrong."""
    code, out, _ = run(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert (list(found), found["machine"], found["backup"]) == (["machine", "storage", "backup"], None, None)
    storage = found["storage"]
    free = storage["file"].pop("free_bytes")
    assert free > 0
    assert storage == {
        "url": f"sqlite:///{path}",
        "file": {
            "bytes": path.stat().st_size, "log_bytes": 0, "journal": "wal", "check": "quick_check", "sound": True
        },
        "server": "",
        "schema": schema_versions()[0],
        "studies": [
            {
                "id": 1, "name": "tiny", "zombies": {}, "silent": [], "elsewhere": [], "unowned": [],
                "counts": {"complete": 3, "pruned": 0, "failed": 0, "running": 0, "waiting": 0},
            }
        ],
        "orphans": {},
        "findings": [],
        "healthy": True,
        "mended": [],
    }  # fmt: skip
    missing = json.loads(run(capsys, "--json", "none.db")[1])["storage"]
    assert list(missing) == [*list(storage)[:1], "file", *list(storage)[2:]]


def test_the_storage_is_found_as_the_other_commands_find_it(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an argument, else OPTUNA_STORAGE, else tuner.db here; a URL that names no storage is wrong usage."""
    other = path.rename(path.with_name("other.db"))
    assert run(capsys)[0] == 1
    assert run(capsys, "other.db")[0] == 0
    assert run(capsys, "--storage", "other.db")[0] == 0
    with pytest.raises(SystemExit) as ended:
        run(capsys, "other.db", "--storage", "other.db")
    assert ended.value.code == 2
    monkeypatch.setenv("OPTUNA_STORAGE", f"sqlite:///{other}")
    assert run(capsys)[0] == 0
    code, out, errors = run(capsys, "mysql://me:s3cr3t@host/base")
    assert (code, out) == (2, "")
    assert errors.startswith("error: wanted a storage in SQLite or PostgreSQL, found mysql://me:***@host/base;")
    assert errors.count("\n") == 1


def test_the_machine_is_described(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, cores, room and the device that a run takes; in both forms."""
    import torch

    assert check.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("python     3.")
    assert f"\ntorch      {torch.__version__}\n" in out
    assert f"\noptuna     {optuna.__version__}\n" in out
    assert f"\nsqlite     {sqlite3.sqlite_version}\n" in out
    assert re.search(r"\ncpu        \d+ cores? usable, \S", out)
    assert re.search(rf"\ndisk       [\d.]+ [MG]B free at {path.parent}\n", out)
    assert check.main(["--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert set(machine["versions"]) == {"python", "torch", "optuna", "sqlalchemy", "sqlite"}
    assert machine["cores"] == len(os.sched_getaffinity(0))
    if not torch.accelerator.is_available():
        assert "\n\nstorage    " in out.split("runs use   cpu (no accelerator that this PyTorch can use)")[1]
        assert (machine["chosen"], machine["accelerators"]) == ("cpu", [])


@pytest.mark.cuda
def test_a_gpu_is_described_with_its_memory(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, all memory and what is free of it, as PyTorch gives them; a run takes the first."""
    import torch

    assert check.main(["--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert len(machine["accelerators"]) == torch.cuda.device_count()
    first = machine["accelerators"][0]
    assert (machine["chosen"], first["name"]) == ("cuda:0", "cuda:0")
    assert first["description"] == torch.cuda.get_device_name(0)
    assert 0 < first["free"] <= first["memory"] == torch.cuda.get_device_properties(0).total_memory


def test_without_the_machine_the_command_loads_no_torch(path: Path) -> None:
    """As a process, with warnings as errors: `--storage-only` is quick, and a reader that has gone is no error."""
    command = [sys.executable, "-W", "error", "-X", "importtime", "-m", "tuner.check", "--storage-only", "--repair"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("verdict    healthy\n")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert errors == [f"checking sqlite:///{path}"]
    assert "optuna.trial" in done.stderr
    assert "torch" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command[:3] + command[5:], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, f"checking sqlite:///{path}\n")


# Not there, or something else.


@pytest.mark.parametrize("name", ["none.db", "no/where/none.db"])
def test_a_missing_file_is_one_line_and_is_not_made(name: str, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking, mending and copying make nothing of a mistyped name."""
    for arguments in ([], ["--repair"], ["--full"]):
        code, out, _ = run(capsys, name, *arguments)
        assert code == 1
        [line] = [line for line in out.splitlines() if line.startswith("wrong")]
        assert str(cwd / name) in line
    code, out, errors = run(capsys, name, "--backup", "copy.db")
    assert (code, out) == (1, "")
    assert errors == f"error: wanted a storage to copy at {cwd / name}, found no such file; name another\n"
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not a database, but text\n" * 50, "kind"),
        (random.Random(0).randbytes(5000), "kind"),
        (b"\0" * 4096, "kind"),
    ],
    ids=["text", "noise", "zeros"],
)
def test_a_file_of_another_kind_is_said_and_left_alone(
    content: bytes, code: str, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1, in one line, also when asked to mend it."""
    (cwd / "tuner.db").write_bytes(content)
    for arguments in ([], ["--repair"]):
        assert codes(capsys, *arguments) == (1, [code])
    assert run(capsys, "--backup", "copy.db")[0] == 1
    assert everything_in(cwd) == {str(cwd / "tuner.db"): content}


def test_a_directory_a_pipe_and_a_socket_are_no_storages(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1; nobody waits for the other end of a pipe."""
    (cwd / "studies").mkdir()
    code, out, _ = run(capsys, "studies")
    assert code == 1
    assert f"try {cwd}/studies/tuner.db\n" in out
    os.mkfifo("pipe.db")
    assert codes(capsys, "pipe.db") == (1, ["place"])
    assert codes(capsys, "loop.db") == (1, ["missing"])
    os.symlink("loop.db", "loop.db")
    assert codes(capsys, "loop.db") == (1, ["place"])


def test_an_empty_file_and_an_interrupted_creation_are_no_damage(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said, with what completes them; exit 0. A database of another program is no storage."""
    path = cwd / "tuner.db"
    path.touch()
    code, out, _ = run(capsys)
    assert code == 0
    assert "\nnote       it holds no tables yet; a run makes them\n" in out
    open_storage(resolve_url(None, {}, cwd)).close()
    execute(path, "DROP TABLE version_info", "DROP TABLE trial_values")
    code, out, _ = run(capsys)
    assert code == 0
    assert "\nnote       its creation was interrupted: tables are missing; the next run completes it\n" in out
    execute(cwd / "music.db", "PRAGMA journal_mode = WAL", "CREATE TABLE songs (title TEXT)")
    before = everything_in(cwd)
    assert codes(capsys, "music.db", "--repair") == (1, ["foreign"])
    assert run(capsys, "music.db", "--backup", "copy.db")[0] == 2
    assert everything_in(cwd) == before


# Damage.


def make_large(path: Path) -> None:
    """A storage of a study with thousands of rows, on some hundred pages."""
    storage = open_storage(resolve_url(str(path), {}, path.parent))
    fill(storage)
    storage.close()
    execute(
        path,
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9000)"
        " INSERT INTO trial_user_attributes (trial_id, key, value_json) SELECT 1, 'key' || i, i FROM n",
    )


def damage(path: Path, how: str) -> None:
    """Cut a real database, or overwrite what is in its middle."""
    make_large(path.with_name("big"))
    whole = path.with_name("big").read_bytes()
    path.with_name("big").unlink()
    noise = random.Random(0).randbytes(len(whole))
    middle = len(whole) // 8192 * 4096
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "cut in a page": whole[:-1000],
            "header": whole[:16] + noise[16:],
            "schema": whole[:100] + noise[100:4096] + whole[4096:],
            "middle": whole[:middle] + noise[: 5 * 4096] + whole[middle + 5 * 4096 :],
        }[how]
    )


@pytest.mark.parametrize("how", ["cut", "cut in a page", "header", "schema", "middle"])
def test_a_damaged_file_is_said_and_never_written_to(how: str, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, with the way to salvage it; not even `--repair` touches it, and no copy is made of the damage."""
    damage(cwd / "tuner.db", how)
    before = everything_in(cwd)
    for arguments in ([], ["--full"], ["--repair"]):
        code, out, errors = run(capsys, *arguments)
        assert (code, errors.count("\n")) == (1, 1)
        [line] = [line for line in out.splitlines() if line.startswith("wrong")]
        if how != "header":
            assert "the file is damaged" in line
            assert "nothing is written to it" in line
            assert f"python -m tuner.check {cwd}/tuner.db --salvage {cwd}/tuner-salvaged.db" in line
        assert everything_in(cwd) == before
    (cwd / "copy.db").write_bytes(b"the copy of before")
    before = everything_in(cwd)
    code, out, errors = run(capsys, "--backup", "copy.db", "--overwrite")
    assert (code, out) == (1, "")
    assert [line.startswith("error: ") for line in errors.splitlines() if not line.startswith("copied ")] == [True]
    assert everything_in(cwd) == before


@pytest.mark.parametrize(("how", "least", "most"), [("cut", 1000, 6000), ("middle", 5000, 8999)])
def test_what_can_be_read_of_a_damaged_file_is_salvaged(
    how: str, least: int, most: int, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a new file that is sound: the rows before and behind the damage; exit 1, since some are lost."""
    damage(cwd / "tuner.db", how)
    before = everything_in(cwd)
    code, out, errors = run(capsys, "--salvage", "saved.db")
    assert (code, errors) == (1, "")
    assert "\nin it      tiny: 3 complete\nlost       rows of " in out
    assert re.search(r"\nlost .*\btrial_user_attributes\b.* could not be read\n", out)
    assert f"\nnext       python -m tuner.check {cwd}/saved.db --repair\n" in out
    assert run(capsys, "saved.db", "--repair")[0] == 0
    with closing(sqlite3.connect("saved.db")) as connection:
        [(count, wrong)] = connection.execute(
            "SELECT count(*), sum(key != 'key' || value_json) FROM trial_user_attributes WHERE key LIKE 'key%'"
        )
        assert (connection.execute("PRAGMA integrity_check").fetchall(), wrong) == ([("ok",)], 0)
        assert least <= count <= most
    assert [t.number for t in trials(cwd / "saved.db")] == [0, 1, 2]
    Path("saved.db").unlink()
    assert everything_in(cwd) == before


def test_a_file_that_lost_an_index_loses_no_rows(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last page was cut, which is of an index: exit 0, and every row is there."""
    damage(cwd / "tuner.db", "cut in a page")
    code, out, _ = run(capsys, "--salvage", "saved.db")
    assert code == 0
    assert "\nlost " not in out
    assert len(trials(cwd / "saved.db")[0].user_attrs) == 9002


def test_a_salvaged_healthy_file_is_whole(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of every table; a file without readable tables is one line."""
    assert run(capsys, "--salvage", "saved.db")[0] == 0
    assert run(capsys, "saved.db", "--full")[0] == 0
    contents = []
    for name in ("tuner.db", "saved.db"):
        with closing(sqlite3.connect(name)) as connection:
            contents.append(list(connection.iterdump()))
    assert sorted(contents[0]) == sorted(contents[1])
    assert run(capsys, "--salvage", "saved.db")[0] == 2
    damage(path, "schema")
    code, out, errors = run(capsys, "--salvage", "other.db")
    assert (code, out, errors.count("\n")) == (1, "", 1)
    for arguments in (["--repair"], ["--backup", "b.db"]):
        with pytest.raises(SystemExit) as ended:
            check.main(["--salvage", "other.db", *arguments])
        assert ended.value.code == 2
    assert not Path("other.db").exists()


def test_the_log_of_a_damaged_file_is_not_written_into_it(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed writer left its log beside a file that was damaged: both are as before, so that both can be salvaged."""
    make_large(cwd / "tuner.db")
    killed_writer(cwd / "tuner.db", "UPDATE studies SET study_name = 'renamed'")
    log = cwd / "tuner.db-wal"
    assert log.stat().st_size > 0
    whole = (cwd / "tuner.db").read_bytes()
    (cwd / "tuner.db").write_bytes(whole[:20480] + random.Random(0).randbytes(20480) + whole[40960:])
    before = {p: content for p, content in everything_in(cwd).items() if not p.endswith("-shm")}
    for arguments in ([], ["--full"], ["--repair"]):
        assert codes(capsys, *arguments) == (1, ["corrupt"])
        assert {p: content for p, content in everything_in(cwd).items() if not p.endswith("-shm")} == before


def killed_writer(path: Path, *statements: str) -> None:
    """Another process that commits `statements` into the log and ends without closing the file."""
    code = f"""
import os, sqlite3
connection = sqlite3.connect({str(path)!r}, isolation_level=None)
connection.execute("PRAGMA wal_autocheckpoint = 0")
for statement in {statements!r}:
    connection.execute(statement)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_indexes_that_disagree_are_made_anew(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that an index does not know is found by `--full` and `--repair`; the rows themselves are as before."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        name = "ix_studies_study_name"
        row = connection.execute("SELECT * FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        connection.execute("DELETE FROM sqlite_master WHERE name = ?", (name,))
        connection.commit()
    execute(path, "UPDATE studies SET study_name = 'renamed'")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
        connection.commit()
    assert codes(capsys) == (0, [])
    assert codes(capsys, "--full") == (1, ["indexes"])
    code, out, _ = run(capsys, "--repair")
    assert code == 0
    assert "\nmended     made the indexes anew\n" in out
    assert "\nstudy      renamed: 3 complete," in out
    assert codes(capsys, "--full") == (0, [])
    assert len(trials(path, "renamed")) == 3


# Permissions and locks.


@pytest.fixture
def nobodys_directory() -> Iterator[Path]:
    """A directory that everybody can reach, with a storage."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    storage = open_storage(resolve_url("tuner.db", {}, directory))
    fill(storage)
    storage.close()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may do everything: become somebody who may not."""
    if os.geteuid() != 0:
        yield
        return
    schema_versions()  # Read while it can be: the environment may lie where only root may look.
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("folder", "file", "told"), [(0o555, 0o644, ["", "/tuner.db"]), (0o755, 0o444, ["/tuner.db"])])
def test_what_cannot_be_written_can_be_looked_at(
    folder: int, file: int, told: list[str], nobodys_directory: Path, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """A read-only folder or file: exit 1 and why no study can go on there, and yet all that is in it."""
    (nobodys_directory / "tuner.db").chmod(file)
    nobodys_directory.chmod(folder)
    if os.geteuid() == 0 and folder == 0o755:
        os.chown(nobodys_directory, 65534, 65534)
    before = everything_in(nobodys_directory)
    request.getfixturevalue("nobody")
    for arguments in ([], ["--repair"]):
        code, out, _ = run(capsys, nobodys_directory / "tuner.db", *arguments)
        assert code == 1
        assert "\nstudy      tiny: 3 complete," in out
        for place in told:
            assert f"\nwrong      no permission to write {nobodys_directory}{place}: " in out
    assert everything_in(nobodys_directory) == before


def test_what_cannot_be_read_is_said(
    nobodys_directory: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Exit 1, one line."""
    (nobodys_directory / "tuner.db").chmod(0o000)
    request.getfixturevalue("nobody")
    assert codes(capsys, nobodys_directory / "tuner.db") == (1, ["permission"])


def test_a_folder_that_cannot_be_entered_is_one_line(
    nobodys_directory: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Whether the storage is in it or the copy is to be."""
    opened, closed = nobodys_directory / "tuner.db", nobodys_directory / "closed"
    closed.mkdir()
    shutil.copy(opened, closed)
    closed.chmod(0o000)
    request.addfinalizer(lambda: closed.chmod(0o755))
    request.getfixturevalue("nobody")
    assert codes(capsys, closed / "tuner.db") == (1, ["place"])
    for arguments in ([closed / "tuner.db", "--backup", "copy.db"], [opened, "--backup", closed / "copy.db"]):
        code, out, errors = run(capsys, *arguments)
        assert (code, out, errors.count("\n")) == (1, "", 1)
        assert errors.startswith("error: wanted a ")


def test_a_file_that_another_program_holds_is_said(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After waiting for it, in one line."""
    monkeypatch.setattr(sqlite_file, "WAIT_SECONDS", 0.2)
    execute(path, "PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert codes(capsys) == (1, ["locked"])
    assert codes(capsys) == (1, ["journal"])


def test_a_link_leads_to_the_file_and_its_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a killed writer left in the log is seen through a link too."""
    killed_writer(path, "UPDATE studies SET study_name = 'renamed'")
    (path.parent / "elsewhere").mkdir()
    os.symlink(path, "elsewhere/link.db")
    code, out, _ = run(capsys, "elsewhere/link.db")
    assert code == 0
    assert "\nstudy      renamed: 3 complete," in out
    assert [p.name for p in (path.parent / "elsewhere").iterdir()] == ["link.db"]


def test_a_network_file_system_is_said(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way out; the file is looked at all the same, and never mended there."""
    monkeypatch.setattr("tuner.storage_url.network_file_system", lambda directory: "nfs4")
    execute(path, "PRAGMA journal_mode = DELETE")
    before = everything_in(path.parent)
    code, out, _ = run(capsys, "--repair")
    assert code == 1
    assert "found a network file system (nfs4)" in out
    assert "\nstudy      tiny: 3 complete," in out
    assert everything_in(path.parent) == before


def test_little_room_is_said(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would soon wait for some."""
    monkeypatch.setattr(sqlite_file, "LITTLE_ROOM", 1 << 60)
    code, out, _ = run(capsys)
    assert code == 1
    assert re.search(r"\nwrong      only [\d.]+ [MG]B are free on its disk; make room\n", out)


# Tables of another Optuna.


def test_older_tables_are_said_with_a_command_that_upgrades_them(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is changed unasked; the command that is printed works, and the storage is healthy afterwards."""
    new, old = schema_versions()[:2]
    execute(path, f"UPDATE alembic_version SET version_num = '{old}'")
    before = everything_in(path.parent)
    for arguments in ([], ["--repair"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 1
        assert f"\nwrong      its tables are of an older Optuna: {old}, not {new}; take a copy, then: " in out
    assert everything_in(path.parent) == before
    command = re.search(r"optuna storage upgrade --storage \S+", out)
    assert command is not None
    words = [str(Path(sys.executable).with_name("optuna")), *shlex.split(command[0])[1:]]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    assert codes(capsys) == (0, [])
    assert len(trials(path)) == 3


def test_tables_from_before_versions_and_newer_ones_are_told_apart(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optuna before 0.9 kept a number; a version that this Optuna does not know is of a newer one."""
    execute(path, "UPDATE alembic_version SET version_num = 'v9.9.9.z'")
    code, out, _ = run(capsys)
    assert code == 1
    assert f"probably a newer one: v9.9.9.z, not {schema_versions()[0]}; pip install -U optuna\n" in out
    execute(path, "DROP TABLE alembic_version", "UPDATE version_info SET schema_version = 1")
    code, out, _ = run(capsys)
    assert code == 1
    assert "its tables are of an older Optuna: 1 (before alembic)" in out


# Rows.


def test_the_trials_of_a_killed_run_are_found_and_ended(
    cwd: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """optuna 3215, 1641: kill -9 leaves RUNNING trials for ever. While it lives they are no zombies."""
    study_file(cwd, model=SLOW, spec='name="tiny", epochs=1000')
    process = start("--study", "tiny.py", "--lanes", "1", "--workers", "1", "--n-trials", "5", cwd=cwd)
    request.addfinalizer(lambda: end_group(process))
    wait_for(lambda: len(running(cwd / "tuner.db")) == 1, process)
    assert codes(capsys) == (0, [])
    assert run(capsys, "--repair")[0] == 0
    assert len(running(cwd / "tuner.db")) == 1
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    code, out, _ = run(capsys)
    assert code == 1
    assert "\nwrong      study 'tiny': trial 0 running for a process of this host that is gone;" in out
    assert out.endswith("\nverdict    1 thing is wrong; --repair mends 1 of them\n")
    code, out, _ = run(capsys, "--repair")
    assert code == 0
    assert "\nmended     study 'tiny': ended trial 0 as failed, of a process that is gone\n" in out
    assert "\nstudy      tiny: 0 complete, 0 pruned, 1 failed, 0 running, 0 waiting\n" in out
    [trial] = trials(cwd / "tuner.db")
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["reason"] == f"its process is gone ({trial.user_attrs['worker']})"
    assert codes(capsys) == (0, [])


def make_running(storage: Storage, study: optuna.Study) -> None:
    """Running trials 3 and 4 of a process that is gone, 5 of this one, 6 of another host, 7 and 8 of another host with
    an old and a new heartbeat, 9 of nobody; 10 is queued."""
    for owner in (GONE, GONE, this_process(), *3 * ["far.away:12:34"], ""):
        storage.owner = owner
        study.ask()
    study.enqueue_trial({"x": 0.5})
    for number, age in ((7, 3600), (8, 5)):
        storage.record_heartbeat(study.trials[number]._trial_id)
        with storage.engine.begin() as connection:
            heart = models.TrialHeartbeatModel
            there = heart.trial_id == study.trials[number]._trial_id
            [old] = connection.execute(heart.__table__.select().with_only_columns(heart.heartbeat).where(there)).one()
            connection.execute(heart.__table__.update().where(there).values(heartbeat=old - timedelta(seconds=age)))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, cwd: Path) -> str:
    """A new storage in each kind of database."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return resolve_url(None, {}, cwd)


def test_running_trials_are_sorted_by_what_is_known_of_their_process(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only those of this host whose process is gone are ended; of the others it is said what can be."""
    storage = open_storage(url)
    make_running(storage, fill(storage))
    storage.close()
    code, out, _ = run(capsys, url, "--json")
    found = json.loads(out)["storage"]
    assert code == 1
    assert found["studies"] == [
        {
            "id": 1, "name": "tiny", "zombies": {GONE: [3, 4]}, "silent": [7], "elsewhere": [6], "unowned": [9],
            "counts": {"complete": 3, "pruned": 0, "failed": 0, "running": 7, "waiting": 1},
        }
    ]  # fmt: skip
    kinds = [(finding["code"], finding["wrong"], finding["mendable"]) for finding in found["findings"]]
    assert kinds == [
        ("zombies", True, True), ("silent", True, False), ("elsewhere", False, False), ("unowned", False, False),
        ("waiting", False, False),
    ]  # fmt: skip
    code, out, _ = run(capsys, url, "--repair")
    assert code == 1  # for the one without a heartbeat
    assert "ended trials 3, 4 as failed" in out
    assert "\nstudy      tiny: 3 complete, 0 pruned, 2 failed, 5 running, 1 waiting\n" in out
    command = re.search(r"optuna (tell .*)", out)
    assert command is not None
    words = [str(Path(sys.executable).with_name("optuna")), *shlex.split(command[1])]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    assert run(capsys, url)[0] == 0


def test_rows_that_belong_to_nothing_are_counted_and_deleted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a trial and of a whole study that are not there; the rows of the others stay as they are."""
    storage = open_storage(resolve_url(None, {}, path.parent))
    fill(storage, "lost", complete=2)
    storage.close()
    kept = params_of(trials(path))
    execute(
        path,
        "DELETE FROM studies WHERE study_name = 'lost'",
        "INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)"
        " VALUES (999, 0, 1.0, 'FINITE')",
    )
    code, out, _ = run(capsys, "--json")
    found = json.loads(out)["storage"]
    assert code == 1
    assert found["orphans"] == {"study_directions": 1, "trials": 2, "trial_intermediate_values": 1}
    assert [finding["code"] for finding in found["findings"]] == ["orphans"]
    code, out, _ = run(capsys, "--repair")
    assert code == 0
    assert "\nmended     deleted 2 rows of trials that belonged to nothing\n" in out
    # Those of the lost study's trials have lost their trials now.
    assert "\nmended     deleted 5 rows of trial_intermediate_values that belonged to nothing\n" in out
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("SELECT count(*) FROM trial_intermediate_values").fetchone() == (6,)
    assert params_of(trials(path)) == kept
    assert codes(capsys) == (0, [])


def test_weights_without_a_trial_and_trials_without_weights_are_said(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best trial's file, if it was trained here; files in the folder beside the storage."""
    folder = WeightsFolder(path.with_name("tuner-weights"), "tiny")
    storage = open_storage(resolve_url(None, {}, path.parent))
    for number, owner in enumerate(("far.away:1:2", this_process())):
        study = optuna.load_study(study_name="tiny", storage=storage)
        storage.owner = owner
        trial = study.ask()
        file = folder.file(trial.number)
        storage.record(trial._trial_id, attributes={"weights": str(file)}, state=TrialState.COMPLETE, values=[-number])
        if number == 0:
            storage.close()
            assert codes(capsys) == (0, [])
    storage.close()
    code, out, _ = run(capsys)
    assert code == 1
    assert f"study 'tiny': the weights of its best trial (4) are gone from {file};" in out
    folder.path.mkdir(parents=True)
    for number in (4, 77, 78):
        folder.file(number).touch()
    code, out, _ = run(capsys)
    assert code == 0
    assert f"\nnote       {folder.path} has weights of trials that are not in it: trials 77, 78;" in out
    folder.path.rename(folder.path.with_name("deleted"))
    code, out, _ = run(capsys)
    assert code == 1
    assert "/deleted has weights of trials that are not in it: trials 4, 77, 78;" in out


def test_the_journal_of_a_plain_optuna_script_is_switched(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers and writers wait for each other until then."""
    study = optuna.create_study(storage=f"sqlite:///{cwd}/tuner.db", study_name="plain")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    study.ask().set_user_attr("worker", GONE)
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    assert codes(capsys) == (1, ["journal", "zombies"])
    with closing(sqlite3.connect(cwd / "tuner.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trials").fetchone()
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_file, "WAIT_SECONDS", 0.2)
            told = sqlite_file.mend_journal(cwd / "tuner.db")
        assert told.startswith("left the journal as it is: database is locked;")
    code, out, _ = run(capsys, "--repair")
    assert code == 0
    assert "\njournal    wal\n" in out
    assert "\nmended     switched the journal from delete to wal\n" in out
    assert "\nmended     study 'plain': ended trial 2 as failed," in out
    assert codes(capsys) == (0, [])


def test_a_large_log_is_written_into_the_file(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed writer left it. As long as somebody reads in it, it stays, and that is said."""
    large = "UPDATE trial_user_attributes SET value_json = '\"' || hex(randomblob(12000000)) || '\"' WHERE trial_id = 1"
    killed_writer(path, large, large, large)
    assert path.with_name("tuner.db-wal").stat().st_size > sqlite_file.LARGE_LOG
    assert codes(capsys) == (1, ["log"])
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trials").fetchone()
        execute(path, "UPDATE studies SET study_name = 'renamed'")
        monkeypatch.setattr(sqlite_file, "WAIT_SECONDS", 0.2)
        code, out, _ = run(capsys, "--repair")
        assert code == 1
        assert "\nmended     left the write-ahead log as it is: a program reads it; see fuser -v " in out
    killed_writer(path, large, large, large)
    code, out, _ = run(capsys, "--repair")
    assert code == 0
    assert "\nmended     wrote the write-ahead log into the file\n" in out
    assert not path.with_name("tuner.db-wal").exists()
    assert len(trials(path, "renamed")[0].user_attrs["epochs"]) == 24_000_000


def test_a_row_that_nobody_can_read_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state that this Optuna does not know, an attribute that is no JSON."""
    execute(path, "UPDATE trials SET state = 'PAUSED' WHERE number = 1")
    code, out, _ = run(capsys)
    assert code == 1
    assert "\nwrong      a row cannot be read: 'PAUSED' is not among the defined enum values." in out
    execute(
        path,
        "UPDATE trials SET state = 'RUNNING' WHERE number = 1",
        "UPDATE trial_user_attributes SET value_json = 'torn' WHERE key = 'worker'",
    )
    assert codes(capsys, "--repair") == (1, ["rows"])


# PostgreSQL.


def test_a_server_is_looked_at(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty database, then a healthy one, with the server's version and without its password; old tables."""
    import psycopg

    url = postgres_url.replace("postgres:@", "postgres:s3cr3t@")
    code, out, _ = run(capsys, url)
    assert code == 0
    assert "\nnote       it holds no tables yet; a run makes them\n" in out
    storage = open_storage(url)
    fill(storage)
    storage.close()
    for arguments in ([], ["--repair"], ["--json"]):
        code, out, errors = run(capsys, url, *arguments)
        assert code == 0
        assert "s3cr3t" not in out + errors
    code, out, _ = run(capsys, url)
    assert re.search(r"\nserver     PostgreSQL \d+", out)
    assert "\nstudy      tiny: 3 complete," in out
    assert out.endswith("\nverdict    healthy\n")
    code, out, errors = run(capsys, url, "--backup", "copy.dump")
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert "pg_dump --format=custom --file='copy.dump' 'postgresql://postgres:***@" in errors
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v3.0.0.a'")
    assert codes(capsys, url, "--repair") == (1, ["schema"])


@pytest.mark.parametrize(
    "url", ["postgresql://me:s3cr3t@127.0.0.1:1/base", "postgresql://me:s3cr3t@127.0.0.1:port/base"]
)
def test_a_server_that_does_not_answer_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, without the password, also with `--repair` and `--debug`."""
    for arguments in ([], ["--repair"], ["--json", "--debug"]):
        code, out, errors = run(capsys, url, *arguments)
        assert code == 1
        assert "s3cr3t" not in out + errors
        assert "wanted to open the storage postgresql+psycopg://me:***@127.0.0.1" in out


# Copies.


def copied(path: Path) -> dict[str, Any]:
    """What is in a copy, by study: how many trials, all of them with everything that belongs to them."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        torn = connection.execute(
            "SELECT count(*) FROM trials WHERE state = 'COMPLETE' AND ("
            " (SELECT count(*) FROM trial_values v WHERE v.trial_id = trials.trial_id) != 1"
            " OR (SELECT count(*) FROM trial_params p WHERE p.trial_id = trials.trial_id) != 1"
            " OR (SELECT count(*) FROM trial_intermediate_values i WHERE i.trial_id = trials.trial_id) != 2)"
        ).fetchone()
        assert torn == (0,)
        return dict(
            connection.execute("SELECT study_name, count(*) FROM studies JOIN trials USING (study_id) GROUP BY 1")
        )


def test_a_copy_holds_what_is_in_the_log_of_a_killed_writer(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`cp` would lose it; the storage is not changed by being copied, and the copy has its permissions."""
    killed_writer(path, "UPDATE studies SET study_name = 'renamed'")
    path.chmod(0o640)
    before = everything_in(path.parent)
    code, out, errors = run(capsys, "--backup", "copy.db")
    assert (code, errors) == (0, "")
    assert out.startswith(f"copy       {path.parent}/copy.db: 0.1 MB, sound (quick_check)\n")
    assert out.endswith("\nin it      renamed: 3 complete\n")
    assert copied(path.with_name("copy.db")) == {"renamed": 3}
    assert path.with_name("copy.db").stat().st_mode & 0o777 == 0o640
    after = everything_in(path.parent)
    assert set(after) - set(before) == {str(path.with_name("copy.db"))}
    assert after[str(path)] == before[str(path)]
    assert after[f"{path}-wal"] == before[f"{path}-wal"]
    document = json.loads(run(capsys, "--backup", "second.db", "--json")[1])
    assert document == {
        "machine": None,
        "storage": None,
        "backup": {
            "file": str(path.with_name("second.db")), "bytes": path.stat().st_size,
            "studies": {"renamed": {"complete": 3}}, "incomplete": [],
        },
    }  # fmt: skip


WRITER = """
import sys, time
from pathlib import Path
import optuna
from tests.test_check import fill
from tuner.storage import open_storage, resolve_url
optuna.logging.set_verbosity(optuna.logging.WARNING)
storage = open_storage(resolve_url("tuner.db", {}, Path.cwd()))
fill(storage, sys.argv[1], 20)
Path(sys.argv[1]).touch()
number = 0
while not Path("enough").exists():
    fill(storage, f"{sys.argv[1]}-{number}", 10)
    number += 1
storage.close()
print(20 + 10 * number)
"""


def test_a_copy_while_two_writers_write_is_of_one_moment(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every complete trial of the copy has all of its values, parameters and reports; no writer is held up or fails."""
    execute(path, "CREATE TABLE filler AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000)"
            " SELECT randomblob(4000) AS block FROM n")  # fmt: skip
    root = Path(__file__).resolve().parent.parent
    environ = {**os.environ, "PYTHONPATH": str(root)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        for name in ("one", "two")
    ]
    try:
        wait_for(lambda: Path("one").exists() and Path("two").exists(), writers[0])
        found = []
        for number in range(4):
            code, out, errors = run(capsys, "--backup", f"copy{number}.db")
            assert (code, errors) == (0, "")
            found.append(copied(path.with_name(f"copy{number}.db")))
            told = sum(int(count) for count in re.findall(r"(\d+) (?:complete|running)", out))
            assert told == sum(found[-1].values())
    finally:
        Path("enough").touch()
        ends = [writer.communicate(timeout=60) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], ends
    assert [err for _, err in ends] == ["", ""]
    assert len(trials(path)) == 3
    counts = [sum(copy.values()) for copy in found]
    assert counts == sorted(counts)
    assert counts[0] >= 43
    assert counts[-1] > counts[0]
    total = 3 + sum(int(out) for out, _ in ends)
    assert total > counts[0]
    assert not list(path.parent.glob(".copy*"))


def test_a_copy_replaces_nothing_unless_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a file that is there, not the storage itself, not one that is in use: exit 2, and all is as before."""
    Path("copy.db").write_text("an older copy")
    Path("folder").mkdir()
    os.symlink(path, "link.db")
    Path("used.db-wal").write_text("the log of another database")
    before = everything_in(path.parent)
    wrong = [
        ["copy.db"], ["tuner.db"], ["link.db"], ["folder"], ["used.db"], ["none/copy.db"], ["tuner.db", "--overwrite"],
        ["link.db", "--overwrite"], ["folder", "--overwrite"], ["used.db", "--overwrite"],
    ]  # fmt: skip
    for arguments in wrong:
        code, out, errors = run(capsys, "--backup", *arguments)
        assert (code, out, errors.count("\n")) == (2, "", 1), arguments
        assert errors.startswith("error: wanted a")
        assert everything_in(path.parent) == before, arguments
    assert run(capsys, "--backup", "copy.db", "--overwrite")[0] == 0
    assert copied(path.with_name("copy.db")) == {"tiny": 3}
    with pytest.raises(SystemExit) as ended:
        check.main(["--overwrite"])
    assert ended.value.code == 2


def test_a_disk_that_gets_full_costs_no_older_copy(path: Path) -> None:
    """Exit 1, one line; the older copy is whole and nothing else is left behind."""
    Path("copy.db").write_text("an older copy")
    before = everything_in(path.parent)
    limit = path.stat().st_size // 2
    done = subprocess.run(
        [sys.executable, "-m", "tuner.check", "--backup", "copy.db", "--overwrite"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: wanted a copy of {path} at {path.parent}/copy.db, found: ")
    assert done.stderr.endswith("; no copy was made\n")
    assert done.stderr.count("\n") == 1
    assert everything_in(path.parent) == before


def test_a_disk_with_too_little_room_is_said_before(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is asked for once: the copy itself takes it."""
    usage = shutil.disk_usage(path.parent)
    left = [path.stat().st_size, 0]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=left.pop(0)))
    assert run(capsys, "--backup", "copy.db")[0] == 0
    code, out, errors = run(capsys, "--backup", "copy2.db")
    assert (code, out) == (1, "")
    assert errors == f"error: wanted 0.1 MB for {path.parent}/copy2.db, found 0.0 MB free; make room\n"


def test_a_copy_is_taken_before_anything_is_mended(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--repair --backup`: the copy has what was there; the storage is mended."""
    storage = open_storage(resolve_url(None, {}, path.parent))
    storage.owner = GONE
    optuna.load_study(study_name="tiny", storage=storage).ask()
    storage.close()
    code, out, _ = run(capsys, "--repair", "--backup", "copy.db")
    assert code == 0
    assert "\nin it      tiny: 3 complete, 1 running\n" in out
    assert "\nmended     study 'tiny': ended trial 3 as failed," in out
    assert [t.state.name for t in trials(path)][3] == "FAIL"
    assert [t.state.name for t in trials(path.with_name("copy.db"))][3] == "RUNNING"


def test_debug_shows_where_an_error_came_from(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback, then the line."""
    Path("copy.db").touch()
    code, _, errors = run(capsys, "--backup", "copy.db", "--debug")
    assert code == 2
    assert errors.startswith("Traceback")
    assert errors.splitlines()[-1].startswith("error: wanted a new file for the copy")


def test_what_is_named_in_lines_cannot_control_the_terminal(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A study's name may be anything."""
    storage = open_storage(resolve_url(None, {}, cwd))
    study = fill(storage, "evil\x1b[31m\nname")
    storage.owner = GONE
    study.ask()
    storage.close()
    out = run(capsys, "--repair", "--backup", "copy.db")[1]
    assert "\x1b" not in out
    assert "\nstudy      evil name: 3 complete, 0 pruned, 1 failed," in out
    assert health.numbered(range(12)) == "trials 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... (12 in all)"
