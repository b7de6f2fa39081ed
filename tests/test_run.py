"""The command as a process of its own: several at once on one file, interrupted, and read by others."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.study_files import (
    SLOW,
    finish,
    params_of,
    run,
    running,
    start,
    states,
    study_file,
    trials,
    wait_for,
    wait_until_gone,
)
from tuner.run import main
from tuner.storage import open_storage

pytest_plugins = "postgres"

INSTANT = 'name="tiny", epochs=1'


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """Four commands that were started at once, 25 trials each, on a file that was not there."""
    folder = tmp_path_factory.mktemp("together")
    study_file(folder, spec=INSTANT, head='print("a study file may print")')
    arguments = ("--study", "tiny.py", "--n-trials", "25", "--pruner", "none", "--json")
    started = [start(*arguments, cwd=folder) for _ in range(4)]
    return folder / "tuner.db", [finish(process) for process in started]


@pytest.mark.timeout(300)
def test_four_commands_at_once_share_a_missing_file(
    together: tuple[Path, list[subprocess.CompletedProcess[str]]],
) -> None:
    """Four exit codes 0, trials 0 to 99 without gap or double, no sample twice, none left running."""
    storage, done = together
    assert [one.returncode for one in done] == [0] * 4, [one.stderr for one in done]
    found = trials(storage)
    assert [t.number for t in found] == list(range(100))
    assert {t.state for t in found} == {TrialState.COMPLETE}
    assert len(set(params_of(found))) == 100
    assert len({t.user_attrs["worker"] for t in found}) == 4
    assert sum("tuner.db: new" in one.stderr for one in done) == 1


def test_stdout_is_one_strict_json_document(together: tuple[Path, list[subprocess.CompletedProcess[str]]]) -> None:
    """`--json`: nothing else on stdout, not even what the study file prints; each command added its own trials."""
    for one in together[1]:
        document = json.loads(one.stdout)
        assert document["added"] == 25
        assert document["states"] == {"complete": 25, "pruned": 0, "failed": 0}
        assert "a study file may print" in one.stderr


def test_plain_optuna_reads_what_was_written(
    together: tuple[Path, list[subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    """A script that knows nothing of tuner finds trials, best value and attributes, and can go on."""
    storage = together[0]
    script = f"""
import optuna
study = optuna.load_study(study_name="tiny", storage="sqlite:///{storage}")
print(len(study.trials), study.best_value, study.best_trial.user_attrs["epochs"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    best = min(t.value for t in trials(storage) if t.value is not None)
    assert done.stdout.split() == ["100", str(best), "1"]


def test_the_optuna_command_reads_what_was_written(
    together: tuple[Path, list[subprocess.CompletedProcess[str]]],
) -> None:
    """`optuna trials` lists all trials with their values."""
    command = [sys.executable, "-c", "import sys; from optuna.cli import main; sys.exit(main())", "trials"]
    more = ["--study-name", "tiny", "--storage", f"sqlite:///{together[0]}", "--format", "json"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [row["number"] for row in listed] == list(range(100))
    assert {row["state"] for row in listed} == {"COMPLETE"}


@pytest.mark.timeout(300)
def test_a_total_is_met_exactly_by_three_commands(tmp_path: Path) -> None:
    """Three commands at once with `--total-trials 20`: twenty trials, three exit codes 0."""
    study_file(tmp_path, spec=INSTANT)
    arguments = ("--study", "tiny.py", "--total-trials", "20", "--pruner", "none", "--json")
    done = [finish(p) for p in [start(*arguments, cwd=tmp_path) for _ in range(3)]]
    assert [one.returncode for one in done] == [0] * 3, [one.stderr for one in done]
    assert states(tmp_path / "tuner.db") == ["COMPLETE"] * 20
    assert sum(json.loads(one.stdout)["added"] for one in done) == 20
    assert {json.loads(one.stdout)["left"] for one in done} == {0}


def slow(folder: Path) -> Path:
    """A study whose trials take minutes."""
    study_file(folder, model=SLOW, spec='name="tiny", epochs=1000')
    return folder / "tuner.db"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_its_trial_and_says_how_to_resume(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Ctrl-C or SIGTERM: gone within seconds, the trial failed with a reason, exit code 130 or 143, results printed."""
    storage = slow(tmp_path)
    process = start("--study", "tiny.py", "--n-trials", "9", "--workers", "1", cwd=tmp_path)
    wait_for(lambda: len(running(storage)) == 1, process)
    time.sleep(0.5)
    began = time.monotonic()
    os.killpg(process.pid, number)
    done = finish(process)
    assert time.monotonic() - began < 15  # 5 s where other programs leave the cores alone
    assert done.returncode == code
    (trial,) = trials(storage)
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["reason"] == f"interrupted: signal {int(number)}"
    assert trial.user_attrs["wall_time"] > 0
    line = done.stderr.splitlines()[-1]
    assert line.startswith("interrupted; resume with: ")
    assert " -m tuner.run --study " in line
    assert str(storage) in shlex.split(line)
    assert "1 trials" in done.stdout or "1 trial " in done.stdout
    assert "Traceback" not in done.stderr
    wait_until_gone(process.pid)


@pytest.mark.timeout(200)
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """While the first one waits for a step that cannot be interrupted, the second ends the process."""
    study_file(
        tmp_path,
        # A step that swallows the first signal's exception, as code of another language would.
        model="""
            class Deaf(nn.Linear):
                def forward(self, x):
                    if os.path.exists("tuner.db"):
                        end = time.monotonic() + 120
                        while time.monotonic() < end:
                            try:
                                open("deaf", "w").close()
                                time.sleep(1)
                            except BaseException:
                                open("first", "w").close()
                    return super().forward(x)
            return Deaf(3, 1)
        """,
    )
    process = start("--study", "tiny.py", "--n-trials", "9", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "deaf").exists(), process)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: (tmp_path / "first").exists(), process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert time.monotonic() - began < 15  # 5 s where other programs leave the cores alone
    assert done.returncode == 130
    wait_until_gone(process.pid)


@pytest.mark.timeout(200)
def test_an_interrupt_before_the_first_trial_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the data are loaded: exit code 130, no traceback, no storage."""
    study_file(tmp_path, data='open("loading", "w").close()\ntime.sleep(60)')
    process = start("--study", "tiny.py", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "loading").exists(), process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tuner.db").exists()


@pytest.mark.timeout(200)
def test_a_run_continues_what_plain_optuna_began_and_plain_optuna_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain script, `tuner.run`, plain script: one study, numbers without gap."""
    study_file(tmp_path)
    script = """
import optuna
study = optuna.create_study(study_name="tiny", storage="sqlite:///tuner.db", load_if_exists=True)
def objective(trial):
    trial.suggest_float("lr", 1e-3, 0.3, log=True)
    return float(trial.suggest_categorical("batch_size", [2, 4]))
study.optimize(objective, n_trials=3)
"""
    for step in ("plain", "tuner", "plain"):
        if step == "plain":
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        else:
            assert main(["--study", "tiny.py", "--n-trials", "3"]) == 0
            assert "resumed, 3 complete" in capsys.readouterr().err
            continue
        assert done.returncode == 0, done.stderr
    found = trials(tmp_path / "tuner.db")
    assert [t.number for t in found] == list(range(9))
    assert [("validation_loss" in t.user_attrs) for t in found] == [False] * 3 + [True] * 3 + [False] * 3


def test_an_unknown_word_on_the_command_line_is_wrong_usage(tmp_path: Path) -> None:
    """Exit code 2 with the usage, and nothing is left behind."""
    done = run("--trials", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_bad_input_is_one_line_of_a_real_process(tmp_path: Path) -> None:
    """Exit code 2, one line on stderr, nothing on stdout, nothing left behind."""
    study_file(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = run("--study", "tiny.py", "--device", "cuda:77", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --device cuda:77")
    assert done.stderr.count("\n") == 1
    assert [p for p in sorted(tmp_path.iterdir()) if p.name != "__pycache__"] == before


@pytest.mark.timeout(200)
def test_commands_share_a_study_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    """Two commands on one database server: the total is exact, numbers have no gap, nothing is left running."""
    study_file(tmp_path, spec=INSTANT)
    arguments = ("--study", "tiny.py", "--total-trials", "12", "--storage", postgres_url, "--json")
    done = [finish(p) for p in [start(*arguments, "--workers", str(w), cwd=tmp_path) for w in (1, 2)]]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    storage = open_storage(postgres_url, create=False)
    found = optuna.load_study(study_name="tiny", storage=storage).trials
    storage.close()
    assert [t.number for t in found] == list(range(len(found)))
    assert sum(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in found) == 12
    assert not any(t.state == TrialState.RUNNING for t in found)
