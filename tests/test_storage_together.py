"""Many processes on one storage: each thing happens once, in SQLite and in PostgreSQL."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import optuna
import psycopg
import pytest
from optuna.trial import TrialState
from storage_helpers import (
    STUDY,
    Crew,
    claim_all,
    finish_each,
    hold_write_lock,
    open_each,
    run_trials,
    study_in,
)

from tuner.errors import BudgetSpentError, StorageError, StorageLostError
from tuner.owner import is_gone
from tuner.storage import Storage, open_storage, resolve_url

pytest_plugins = "postgres"

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Processes for all tests of this module."""
    crew = Crew()
    yield crew
    crew.pool.shutdown()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a storage that is not there yet, in each kind of database."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return resolve_url("study.db", {}, tmp_path)


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    """It, opened."""
    opened = open_storage(url)
    yield opened
    opened.close()


def fresh_urls(tmp_path: Path, count: int) -> list[str]:
    return [resolve_url(f"study-{number}.db", {}, tmp_path) for number in range(count)]


def fresh_databases(server: Any, count: int) -> list[str]:
    names = [f"fresh_{time.monotonic_ns()}_{number}" for number in range(count)]
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for name in names:
            connection.execute(f"CREATE DATABASE {name}")
    return [server.get_uri(database=name, driver="psycopg") for name in names]


def test_eight_processes_open_a_missing_file_at_once(crew: Crew, tmp_path: Path) -> None:
    """Optuna 4621, 1092, 3044, 820: tables made twice, "database is locked". Here: no error, one set of tables."""
    assert crew.together(8, open_each, fresh_urls(tmp_path, 3)) == [3] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"study-{number}.db" for number in range(3)]


def test_eight_processes_open_an_empty_postgresql_database_at_once(crew: Crew, postgres_server: Any) -> None:
    """The same on a server, where Optuna alone fails ten times of ten."""
    urls = fresh_databases(postgres_server, 2)
    assert crew.together(8, open_each, urls) == [2] * 8
    for url in urls:
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            assert connection.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)


@pytest.mark.chaos
def test_eight_processes_open_a_missing_storage_at_once_twenty_times(
    crew: Crew, tmp_path: Path, postgres_server: Any
) -> None:
    """The full repetition that reports.md asks for, on both kinds."""
    urls = fresh_urls(tmp_path, 20) + fresh_databases(postgres_server, 20)
    assert crew.together(8, open_each, urls) == [40] * 8


def test_a_queued_trial_is_claimed_by_exactly_one_process(crew: Crew, storage: Storage) -> None:
    """Optuna 4002, 6084: queued trials ran several times. Each of 24 is claimed once by 4 processes, with its owner."""
    study = study_in(storage)
    for number in range(24):
        study.enqueue_trial({"x": float(number)})
    claimed = crew.together(4, claim_all, storage.given_url)
    assert sorted(number for numbers in claimed for number in numbers) == list(range(24))
    for worker, numbers in enumerate(claimed):
        for number in numbers:
            assert study.trials[number].user_attrs["worker"] == f"worker-{worker}"


def test_trial_numbers_have_no_gap_and_no_double(crew: Crew, storage: Storage) -> None:
    """Optuna 1488: the same number twice. 4 processes of 8 trials each get 0 to 31."""
    study = study_in(storage)
    found = crew.together(4, run_trials, storage.given_url, 8, None)
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(32))
    assert [trial.number for trial in study.trials] == list(range(32))


def test_a_total_is_met_exactly_by_processes_that_know_nothing_of_each_other(crew: Crew, storage: Storage) -> None:
    """Optuna 2907: a limit overshot. 4 processes that would run 8 each start 14 trials together, then all stop."""
    study = study_in(storage)
    found = crew.together(4, run_trials, storage.given_url, 8, 14)
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(14))
    assert all(spent for numbers, spent in found if len(numbers) < 8)
    assert storage.finished_count(study._study_id) == (14, 0)


@pytest.mark.parametrize("through_optuna", [False, True])
def test_of_two_processes_that_end_a_trial_one_succeeds(crew: Crew, storage: Storage, through_optuna: bool) -> None:
    """Optuna told both "success" 35 times of 60. Here the other learns it, and changes nothing."""
    study = study_in(storage)
    trial_ids = [storage.create_new_trial(study._study_id) for _ in range(15)]
    won = crew.together(2, finish_each, storage.given_url, trial_ids, through_optuna)
    assert sorted(won[0] + won[1]) == trial_ids
    for number, ids in enumerate(won):
        for trial_id in ids:
            trial = storage.get_trial(trial_id)
            assert trial.values == [float(number)]
            assert trial.user_attrs == ({} if through_optuna else {"by": number})


def test_a_foreign_write_lock_is_waited_for_and_hinders_no_reader(tmp_path: Path) -> None:
    """Optuna 4994: a lock of some seconds ended a thread. Here the writer waits, and a reader does not."""
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = study_in(storage)
    trial = study.ask()
    held = threading.Event()
    foreign = threading.Thread(target=hold_write_lock, args=(tmp_path / "study.db", 3.0, held))
    foreign.start()
    held.wait(10)
    started = time.monotonic()
    assert [found.number for found in study.trials] == [0]
    assert storage.finished_count(study._study_id) == (0, 1)
    assert storage.get_trial(trial._trial_id).state == TrialState.RUNNING
    assert len(storage.get_all_studies()) == 1
    read = time.monotonic() - started
    study.tell(trial, 1.0)
    written = time.monotonic() - started
    foreign.join()
    assert read < 2.0
    assert 2.0 < written < 30.0
    assert study.best_value == 1.0
    storage.close()


def test_a_storage_can_be_opened_while_another_program_writes(tmp_path: Path) -> None:
    """A command that starts beside a long write neither fails nor waits for its end."""
    url = resolve_url("study.db", {}, tmp_path)
    open_storage(url).close()
    held = threading.Event()
    foreign = threading.Thread(target=hold_write_lock, args=(tmp_path / "study.db", 3.0, held))
    foreign.start()
    held.wait(10)
    storage = open_storage(url)
    assert foreign.is_alive()
    storage.close()
    foreign.join()


def test_a_foreign_read_transaction_hinders_no_writer(tmp_path: Path) -> None:
    """A page or a backup that reads for long: writers go on meanwhile, and it still sees what it saw."""
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = study_in(storage)
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trials").fetchone() == (0,)
        started = time.monotonic()
        for _ in range(5):
            study.tell(study.ask(), 1.0)
        assert time.monotonic() - started < 10
        assert reader.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    assert len(study.trials) == 5
    storage.close()


def test_a_long_read_of_a_plain_optuna_file_hinders_no_start(tmp_path: Path) -> None:
    """Without a write-ahead log, a reader keeps the log from being made. It is made by the next that can."""
    url = resolve_url("study.db", {}, tmp_path)
    optuna.storages.RDBStorage(url).engine.dispose()
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trials").fetchone()
        started = time.monotonic()
        storage = open_storage(url)
        assert time.monotonic() - started < 20
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    study = study_in(storage)
    study.tell(study.ask(), 1.0)
    storage.close()
    again = open_storage(url)
    with closing(again.engine.raw_connection()) as connection:
        cursor = connection.cursor()
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (120_000,)
    again.close()


def test_a_lock_that_never_ends_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded, and what is said then has no traceback of SQLAlchemy's in it."""
    for module in ("tuner.storage", "tuner.storage_transactions"):
        monkeypatch.setattr(f"{module}.BUSY_SECONDS", 0.2)
    storage = open_storage(resolve_url("study.db", {}, tmp_path))
    study = study_in(storage)
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="database is locked") as found:
            study.ask()
    assert "\n" not in str(found.value)
    assert study.trials == []
    storage.close()


@pytest.mark.parametrize("before_the_server", [False, True], ids=["after the commit", "before the commit"])
def test_a_commit_whose_answer_is_lost_happens_once(bad_line: Any, before_the_server: bool) -> None:
    """Optuna 5582: a connection breaks. Whether or not the server had committed: written once, and no error."""
    storage = open_storage(bad_line.url)
    bad_line.before_the_server = before_the_server
    bad_line.cuts = 1
    study = study_in(storage)
    study.enqueue_trial({"x": 1.0})
    bad_line.cuts = 1
    claimed = study.ask()
    assert bad_line.cuts == 0
    bad_line.cuts = 1
    created = study.ask()
    assert bad_line.cuts == 0
    for trial in (claimed, created):
        bad_line.cuts = 1
        storage.record(trial._trial_id, attributes={"a": 1}, state=TrialState.COMPLETE, values=[2.0])
        assert bad_line.cuts == 0
    assert [trial.number for trial in (claimed, created)] == [0, 1]
    assert [(t.number, t.state, t.values) for t in study.trials] == [
        (0, TrialState.COMPLETE, [2.0]),
        (1, TrialState.COMPLETE, [2.0]),
    ]
    assert len(storage.get_all_studies()) == 1
    storage.close()


def test_a_server_that_drops_every_connection_is_waited_for(postgres_url: str) -> None:
    """Connections that died while a trial was trained are replaced without an error."""
    storage = open_storage(postgres_url)
    study = study_in(storage)
    trial = study.ask()
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    study.tell(trial, 1.0)
    assert study.best_value == 1.0
    storage.close()


def test_the_budget_also_bounds_what_is_claimed(storage: Storage) -> None:
    """A queued trial that would be one too many stays in the queue, unowned."""
    study = study_in(storage)
    study.enqueue_trial({"x": 1.0})
    storage.create_new_trial(study._study_id)
    storage.owner, storage.total_limit = "me", 1
    with pytest.raises(BudgetSpentError):
        study.ask()
    queued = study.trials[0]
    assert (queued.state, queued.user_attrs) == (TrialState.WAITING, {})
    storage.total_limit = 2
    assert study.ask().number == 0
    assert study.trials[0].user_attrs == {"worker": "me"}


def test_a_failed_trial_does_not_count_towards_the_budget(storage: Storage) -> None:
    """Complete, pruned and running trials count; failed ones and those of other studies do not."""
    study = study_in(storage)
    other = optuna.create_study(storage=storage, study_name="other")
    for _ in range(3):
        storage.record(other.ask()._trial_id, state=TrialState.COMPLETE, values=[1.0])
        storage.record(study.ask()._trial_id, state=TrialState.FAIL)
    storage.total_limit = 1
    storage.record(study.ask()._trial_id, state=TrialState.PRUNED)
    with pytest.raises(BudgetSpentError, match="found 1 complete, pruned or running of 1"):
        study.ask()
    assert len(study.trials) == 4


def test_the_trials_of_a_dead_worker_are_failed_with_the_reason(storage: Storage) -> None:
    """Only the running ones of that worker, in that study; one that lives after all learns it at its next write."""
    study = study_in(storage)
    other = optuna.create_study(storage=storage, study_name="other")
    storage.owner = "dead"
    trials = [study.ask() for _ in range(3)]
    elsewhere = other.ask()
    storage.record(trials[1]._trial_id, state=TrialState.COMPLETE, values=[1.0])
    storage.owner = "alive"
    mine = study.ask()
    assert storage.fail_trials_of(study._study_id, "dead", "worker killed by signal 9") == [0, 2]
    assert storage.fail_trials_of(study._study_id, "dead", "again") == []
    states = [trial.state.name for trial in study.trials]
    assert states == ["FAIL", "COMPLETE", "FAIL", "RUNNING"]
    assert study.trials[2].user_attrs == {"worker": "dead", "reason": "worker killed by signal 9"}
    assert study.trials[2].datetime_complete is not None
    assert other.trials[elsewhere.number].state == TrialState.RUNNING
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        storage.record(trials[0]._trial_id, attributes={"late": True}, state=TrialState.COMPLETE, values=[1.0])
    assert "late" not in study.trials[0].user_attrs
    assert mine.number == 3


def test_opening_a_storage_again_keeps_the_locks_of_its_process(tmp_path: Path) -> None:
    """A second opening in one process does not let others remove the write-ahead log that the first one writes to."""
    url = resolve_url(None, {}, tmp_path)
    first = open_storage(url)
    study = study_in(first)
    study.ask()
    second = open_storage(url)
    code = f"import optuna; optuna.load_study(study_name={STUDY!r}, storage={url!r}).trials"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    study.ask()
    first.close()
    second.close()
    with closing(sqlite3.connect(tmp_path / "tuner.db")) as connection:
        assert connection.execute("SELECT count(*) FROM trials").fetchone() == (2,)


def test_a_file_that_is_deleted_under_a_storage_is_noticed(tmp_path: Path) -> None:
    """SQLite would go on writing to the deleted file, and every trial from then on would be lost without a word."""
    storage = open_storage(resolve_url(None, {}, tmp_path))
    study = study_in(storage)
    study.ask()
    (tmp_path / "tuner.db").rename(tmp_path / "moved.db")
    with pytest.raises(StorageLostError, match="deleted or replaced"):
        study.ask()
    open_storage(resolve_url(None, {}, tmp_path)).close()
    with pytest.raises(StorageLostError, match="deleted or replaced"):
        study.ask()
    storage.close()


def test_a_full_disk_is_waited_for_and_nothing_told_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write without room says so, waits, and is done when there is room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("may not mount a small file system here")
    try:
        storage = open_storage(resolve_url(None, {}, disk))
        study = study_in(storage)
        trial = study.ask()
        fill = disk / "fill"
        with suppress(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        threading.Timer(2, fill.unlink).start()
        reports = {step: float(step) for step in range(5000)}
        storage.record(trial._trial_id, reports=reports, state=TrialState.COMPLETE, values=[1.0])
        assert "no room on the disk" in caplog.text
        assert study.trials[0].intermediate_values == reports
        storage.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_loop_reads_again_only_what_is_news(tmp_path: Path) -> None:
    """Own reports and starts are none; own ends and all that others write are."""
    url = resolve_url(str(tmp_path / "study.db"), {}, tmp_path)
    storage, other = open_storage(url), open_storage(url)
    study = optuna.create_study(storage=storage, study_name="shared")
    first, second = study.ask(), study.ask()
    elsewhere = optuna.load_study(study_name="shared", storage=other)
    assert storage.is_news()
    assert not storage.is_news()
    storage.record(first._trial_id, reports={0: 1.0})
    study.ask()
    study.get_trials(deepcopy=False)
    assert not storage.is_news()
    elsewhere.ask()
    assert storage.is_news()
    assert not storage.is_news()
    storage.record(first._trial_id, state=TrialState.COMPLETE, values=[0.5])
    assert storage.is_news()
    other.record(second._trial_id, state=TrialState.FAIL)
    assert storage.is_news()


def test_two_studies_on_one_storage_see_the_same(tmp_path: Path) -> None:
    """Each has a cache of its own; what one has read the other reads, too."""
    storage = open_storage(resolve_url(str(tmp_path / "study.db"), {}, tmp_path))
    one = optuna.create_study(storage=storage, study_name="shared")
    two = optuna.load_study(study_name="shared", storage=storage)
    for number in range(3):
        trial = one.ask()
        assert len(two.trials) == len(one.trials) == number + 1
        one.tell(trial, 0.5)
        assert two.trials[number].state == one.trials[number].state == TrialState.COMPLETE


def test_a_process_that_has_ended_is_gone_also_while_its_parent_has_not_asked() -> None:
    """The kernel keeps its number until then."""
    code = "from tuner.owner import this_process; print(this_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        owner = process.stdout.readline().strip()
        assert not is_gone(owner)
        process.kill()
        deadline = time.monotonic() + 10
        while not is_gone(owner) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_gone(owner)
        process.stdin.close()
