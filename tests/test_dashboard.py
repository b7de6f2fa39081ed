"""The dashboard: a real server, a real browser, a real file that another process is writing to."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import browser
import optuna
import pytest
from optuna.exceptions import ExperimentalWarning, StorageInternalError

from tuner import dashboard
from tuner.errors import StorageError, UsageError
from tuner.storage_url import resolve_url

WRITER = """
import sys, time, optuna
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.load_study(study_name="digits", storage=sys.argv[1], sampler=optuna.samplers.RandomSampler())
def objective(trial):
    loss = trial.suggest_float("lr", 0.001, 1.0, log=True)
    for epoch in range(3):
        trial.report(loss / (epoch + 1), epoch)
        time.sleep(0.02)
    trial.set_user_attr("wall_time", 0.06)
    return loss / 3
study.optimize(objective, n_trials=100_000)
"""


@dataclass
class Dashboard:
    """A dashboard's process."""

    process: subprocess.Popen[str]

    @cached_property
    def port(self) -> int:
        """Where it listens, once it has printed its address."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"http://[0-9.]+:(\d+)/dashboard\n", line)
        assert found, line + self.process.stderr.read()
        return int(found[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """The status and the decoded answer to a request."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            all_headers = {"Content-Type": "application/json", **headers}
            connection.request(method, path, None if body is None else json.dumps(body), all_headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.getheader("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(text) if is_json and text else text

    def end(self, number: int) -> tuple[int, str]:
        """End it by the signal `number`: its exit code and what it said on stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@contextmanager
def running(*arguments: str, cwd: Path, **environ: str) -> Iterator[Dashboard]:
    """A dashboard, as its user starts it."""
    command = [sys.executable, "-W", "error", "-m", "tuner.dashboard", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=os.environ | environ) as process:
        try:
            yield Dashboard(process)
        finally:
            process.kill()


def make_study(path: Path, trials: int) -> str:
    """A study "digits" with a value named "validation loss", in a file with a write-ahead log; its URL."""
    url = f"sqlite:///{path}"
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(storage=storage, study_name="digits", sampler=optuna.samplers.RandomSampler(seed=0))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(["validation loss"])
    study.optimize(lambda trial: trial.suggest_float("lr", 0.001, 1.0, log=True), n_trials=trials)
    storage.engine.dispose()
    return url


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dashboard, Path]]:
    """A read-only dashboard and its storage, to which another process adds trials all the time."""
    path = tmp_path_factory.mktemp("beside") / "tuner.db"
    url = make_study(path, 3)
    with running("--storage", str(path), "--port", "0", cwd=path.parent) as served:
        assert served.port
        command = [sys.executable, "-W", "error", "-c", WRITER, url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as writer:
            try:
                yield served, path
                assert writer.poll() is None, writer.communicate()[1]
            finally:
                writer.kill()


def number_of_trials(served: Dashboard) -> int:
    return len(served.ask("GET", "/api/studies/1?after=0")[1]["trials"])


def test_the_page_shows_a_running_study(beside: tuple[Dashboard, Path], tmp_path: Path) -> None:
    """In a real browser: the study's name, the name of its value, learning curves, and trials, also new ones."""
    served, _ = beside
    while number_of_trials(served) < 6:
        time.sleep(0.2)
    picture = tmp_path / "page.png"
    page = browser.page(f"{served.address}/dashboard/studies/1", tmp_path / "profile", picture=picture)
    assert "digits (id=1)" in page
    assert "validation loss" in page
    assert "Best Trial (number=" in page
    assert "Intermediate values" in page
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # a blank page has 7,000
    trials = browser.page(f"{served.address}/dashboard/studies/1/trials", tmp_path / "profile")
    for number in range(6):
        assert re.search(rf"Trial {number}\b", trials)


def test_a_reader_does_not_hinder_a_writer(beside: tuple[Dashboard, Path]) -> None:
    """While the page's question is asked without a pause, the other process goes on adding trials."""
    served, path = beside
    with closing(sqlite3.connect(path)) as connection:
        count = "SELECT count(*) FROM trials"
        before = connection.execute(count).fetchone()[0]
        deadline = time.monotonic() + 15
        while connection.execute(count).fetchone()[0] < before + 5:
            assert served.ask("GET", "/api/studies/1?after=0")[0] == 200
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/api/studies/1", {}),
        ("POST", "/api/studies/1/rename", {"study_name": "other"}),
        ("POST", "/api/studies", {"study_name": "other", "directions": ["minimize"]}),
        ("PUT", "/api/studies/1/note", {"version": 1, "body": "a note"}),
        ("POST", "/api/trials/1/user-attrs", {"user_attrs": {"a": 1}}),
        ("POST", "/incompatible-rdb-schema", None),
        ("OPTIONS", "/api/studies", None),
    ],
)
def test_what_would_write_is_refused(
    beside: tuple[Dashboard, Path], method: str, path: str, body: dict[str, Any] | None
) -> None:
    """A read-only dashboard answers 403 and says how to start one that writes; nothing has changed."""
    served, _ = beside
    status, answer = served.ask(method, path, body)
    assert (status, "--writable" in answer["reason"]) == (403, True)
    studies = served.ask("GET", "/api/studies")[1]["study_summaries"]
    assert [(s["study_name"], s["study_id"]) for s in studies] == [("digits", 1)]


def test_another_hosts_name_is_refused(beside: tuple[Dashboard, Path]) -> None:
    """A name that somebody else pointed at this machine reads nothing (DNS rebinding); its own names do."""
    served, _ = beside
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example", "", "[", "192.168.0.1"):
        status, answer = served.ask("GET", "/api/studies", Host=host)
        assert (status, list(answer)) == (403, ["reason"]), host
    for host in ("127.0.0.1", f"localhost:{served.port}", "LOCALHOST", "[::1]:8080"):
        assert served.ask("GET", "/api/studies", Host=host)[0] == 200, host


def test_the_server_does_not_load_torch(beside: tuple[Dashboard, Path]) -> None:
    """Nor after it has answered what a page asks, importances among it."""
    served, _ = beside
    assert served.ask("GET", "/api/studies/1/param_importances")[0] == 200
    maps = Path(f"/proc/{served.process.pid}/maps")
    if not maps.exists():
        pytest.skip("wanted /proc, which only Linux has")
    assert "numpy" in maps.read_text()
    assert "torch" not in maps.read_text()


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """The read-only connections refuse to write, and leave neither a changed file nor a new one behind."""
    path = tmp_path / "a b%20c#{d}?.db"
    make_study(tmp_path / "tuner.db", 1)
    (tmp_path / "tuner.db").rename(path)
    before = path.read_bytes()
    storage = dashboard.open_for_reading(resolve_url(str(path), {}, tmp_path))
    assert [study.study_name for study in storage.get_all_studies()] == ["digits"]
    with pytest.raises(StorageInternalError) as caught:
        storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "other")
    assert "readonly" in str(caught.value.__cause__)
    storage.engine.dispose()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_missing_file_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the path in the message, no traceback, and no empty file, writable or not."""
    storage = str(tmp_path / "none.db")
    for more in ([], ["--writable"]):
        assert dashboard.main(["--storage", storage, *more]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert re.fullmatch(r"error: wanted .*none\.db, found .*\n", output.err)
        assert list(tmp_path.iterdir()) == []
    command = [sys.executable, "-m", "tuner.dashboard", "--storage", storage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", output.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_storage_is_refused_and_kept(content: bytes, tmp_path: Path) -> None:
    """Empty, foreign or damaged: one line, and not a byte is changed."""
    path = tmp_path / "tuner.db"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"tuner\.db") as caught:
        dashboard.open_for_reading(f"sqlite:///{path}")
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["tuner.db"]


def nothing(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """An application without an answer."""
    return []


def test_a_taken_port_is_passed_over_unless_it_was_chosen() -> None:
    """Without --port the next free one is taken; a chosen one that is taken is an error with the way out."""
    with dashboard.bind("127.0.0.1", None, nothing) as first, dashboard.bind("127.0.0.1", None, nothing) as second:
        assert dashboard.PORT <= first.server_port < second.server_port
        with pytest.raises(UsageError, match=f"127.0.0.1:{first.server_port}, found the port taken; leave out --port"):
            dashboard.bind("127.0.0.1", first.server_port, nothing)
    with pytest.raises(UsageError, match=r"wanted to listen at 203\.0\.113\.1:8080, found: .*; try --host 127"):
        dashboard.bind("203.0.113.1", None, nothing)


def test_a_signal_ends_it_quietly_and_writable_writes(tmp_path: Path) -> None:
    """130 after Ctrl-C and 143 after SIGTERM, no traceback; --writable lets its own page write, and no other's."""
    make_study(tmp_path / "tuner.db", 1)
    url = f"sqlite:///{tmp_path / 'tuner.db'}"
    with (
        running("--port", "0", "--host", "0.0.0.0", cwd=tmp_path) as first,
        running("--port", "0", "--writable", cwd=Path("/"), OPTUNA_STORAGE=url) as second,
    ):
        assert first.port != second.port
        assert first.ask("GET", "/api/studies", Host="some.name")[0] == 200
        new = {"study_name": "other", "directions": ["minimize"]}
        assert second.ask("POST", "/api/studies", new, Origin="http://evil.example")[0] == 403
        assert second.ask("POST", "/api/studies", new, Origin=second.address)[0] == 201
        names = [s["study_name"] for s in first.ask("GET", "/api/studies")[1]["study_summaries"]]
        assert names == ["digits", "other"]
        code, errors = first.end(signal.SIGINT)
        assert code == 130
        assert re.fullmatch(r"warning: .* 0\.0\.0\.0 .* no login\ndashboard of .*tuner\.db \(read-only\).*\n", errors)
        code, errors = second.end(signal.SIGTERM)
        assert code == 143
        assert re.fullmatch(r"dashboard of .*tuner\.db \(its buttons write\).*\n", errors)
    assert [file.name for file in tmp_path.iterdir()] == ["tuner.db"]


def test_help_is_quick() -> None:
    """It loads neither torch nor Optuna nor the dashboard."""
    code = (
        "import sys; from tuner.dashboard import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'optuna', 'optuna_dashboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "--writable" in done.stdout
    assert done.stdout.endswith("\n[]\n")
