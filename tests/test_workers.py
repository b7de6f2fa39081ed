"""One command's workers: spawned processes that share its budget, die, and are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from tests.study_files import (
    SLOW,
    end_group,
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
from tuner.assignment import Assignment, CountedBudget
from tuner.results import Target
from tuner.samplers import grid_cells

pytestmark = pytest.mark.timeout(240)


def test_a_budget_is_taken_once_and_given_back() -> None:
    """So many trials and no more, however often it is asked; what is given back may be taken again."""
    budget = CountedBudget(3, None)
    assert [budget.take() for _ in range(5)] == [True] * 3 + [False] * 2
    budget.give_back(1)
    assert [budget.take() for _ in range(2)] == [True, False]
    endless = CountedBudget(None, None)
    assert all(endless.take() for _ in range(100))
    endless.give_back(1)
    assert not CountedBudget.until(3, 0.0).take()
    assert CountedBudget.until(None, 100.0).take()


def test_every_worker_of_every_run_has_a_sampler_seed_of_its_own() -> None:
    """The first worker of a study's first run has the seed itself, so that it can be repeated; no seed is repeated."""

    def assignment(run: int, seed: int | None = 7) -> Assignment:
        target = Target(("loss",), (False,))
        rest = {"sampler": "tpe", "pruner": "none", "threshold": None, "total_limit": None, "weights": None}
        return Assignment("s", "u", "n", target, "cpu", 1, lanes=1, precision="float32", seed=seed, run=run, **rest)  # type: ignore[arg-type]

    assert assignment(0).sampler_seed(0) == 7
    seeds = {assignment(run).sampler_seed(worker) for run in range(20) for worker in range(20)}
    assert len(seeds) == 400
    assert assignment(3).sampler_seed(2) == assignment(3).sampler_seed(2)
    assert assignment(3, seed=None).sampler_seed(2) is None


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Four workers, thirty trials, one seed."""
    folder = tmp_path_factory.mktemp("four")
    study_file(folder, head='print("every worker prints this")', spec='name="tiny", epochs=1')
    arguments = ("--study", "tiny.py", "--workers", "4", "--n-trials", "30", "--seed", "7", "--sampler", "random")
    return folder / "tuner.db", run(*arguments, "--pruner", "none", "--json", cwd=folder)


def test_workers_share_the_number_of_trials(four: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """`--workers 4 --n-trials 30` is thirty trials, numbered 0 to 29, all complete, by four processes."""
    storage, done = four
    assert done.returncode == 0, done.stderr
    found = trials(storage)
    assert [t.number for t in found] == list(range(30))
    assert {t.state for t in found} == {TrialState.COMPLETE}
    document = json.loads(done.stdout)
    assert document["added"] == 30
    assert "4 workers" in document["device"]
    # A worker may come too late for a share; nobody else than the four may have one.
    owners = {t.user_attrs["worker"] for t in found}
    assert 1 <= len(owners) <= 4
    assert not any(f":{os.getpid()}:" in owner for owner in owners)


def test_workers_with_one_seed_sample_different_trials(four: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """No sample twice."""
    assert len(set(params_of(trials(four[0])))) == 30


def test_stdout_is_for_the_result_alone_with_workers_too(
    four: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """What study files print in workers goes to stderr."""
    json.loads(four[1].stdout)
    assert "every worker prints this" in four[1].stderr
    assert "Traceback" not in four[1].stderr


def test_the_best_trials_weights_are_kept_by_workers_too(
    four: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """The file of the best trial is there, and that of no other finished trial outlives the next best."""
    document = json.loads(four[1].stdout)
    assert Path(document["weights"]).name == f"trial-{document['best']['number']}.pt"
    assert Path(document["weights"]).is_file()


def test_a_grid_is_shared_by_workers(tmp_path: Path) -> None:
    """A 3 x 3 grid and four workers: each cell complete exactly once, and it ends by itself."""
    study_file(
        tmp_path,
        space="""
            return {
                "lr": trial.suggest_float("lr", 0.1, 0.3, step=0.1),
                "batch_size": trial.suggest_categorical("batch_size", [1, 2, 4]),
            }
        """,
        spec='name="tiny", epochs=1',
    )
    done = run("--study", "tiny.py", "--sampler", "grid", "--workers", "4", "--pruner", "none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = trials(tmp_path / "tuner.db")
    assert [t.state for t in found] == [TrialState.COMPLETE] * 9
    cells = grid_cells(found[0].distributions)
    assert sorted(params_of(found)) == sorted(tuple(sorted(cell.items())) for cell in cells)


def test_a_killed_worker_is_replaced_and_its_trial_fails_with_the_reason(tmp_path: Path) -> None:
    """kill -9 on one of two workers: another takes its place, and the number of trials is exact."""
    study_file(tmp_path, model=SLOW, spec='name="tiny", epochs=4')
    storage = tmp_path / "tuner.db"
    arguments = (
        "--study",
        "tiny.py",
        "--workers",
        "2",
        "--n-trials",
        "8",
        "--pruner",
        "none",
        "--lanes",
        "1",
        "--json",
    )
    process = start(*arguments, cwd=tmp_path)
    wait_for(lambda: len(running(storage)) == 2, process)
    owner = running(storage)[0]
    os.kill(int(owner.split(":")[-2]), signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    found = trials(storage)
    assert [t.number for t in found] == list(range(8))
    failed = [t for t in found if t.state == TrialState.FAIL]
    assert [t.user_attrs["worker"] for t in failed] == [owner]
    assert failed[0].user_attrs["reason"] == "its worker ended with exit code -9"
    assert {t.state for t in found} == {TrialState.FAIL, TrialState.COMPLETE}
    assert "died with exit code -9; another one takes its place" in done.stderr
    assert json.loads(done.stdout)["complete"] == 7


def test_ctrl_c_ends_all_workers_and_their_trials(tmp_path: Path) -> None:
    """As a terminal sends it, to every process: all gone within seconds, trials ended with a reason, exit code 130."""
    study_file(tmp_path, model=SLOW, spec='name="tiny", epochs=1000')
    storage = tmp_path / "tuner.db"
    process = start("--study", "tiny.py", "--workers", "4", "--lanes", "1", cwd=tmp_path)
    wait_for(lambda: len(running(storage)) == 4, process)
    time.sleep(0.5)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    wait_until_gone(process.pid)
    assert time.monotonic() - began < 15  # 5 s where other programs leave the cores alone
    found = trials(storage)
    assert [t.state for t in found] == [TrialState.FAIL] * 4
    for trial in found:
        assert trial.user_attrs["reason"].startswith(("interrupted: the command was ended", "its worker ended"))
    assert "resume with: " in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_workers_start_ends_quietly(tmp_path: Path) -> None:
    """A worker that is still importing when the signal comes prints no traceback, and starts no trial."""
    study_file(tmp_path, spec='name="tiny", epochs=1')
    # Python reads this at its start: a spawned worker says that it has begun, and takes its time.
    (tmp_path / "sitecustomize.py").write_text("""
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    open(f"started-{os.getpid()}", "w").close()
    time.sleep(2)
""")
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    process = start("--study", "tiny.py", "--workers", "3", cwd=tmp_path, environ=environ)
    wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 3, process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    assert "Traceback" not in done.stderr
    wait_until_gone(process.pid)
    assert states(tmp_path / "tuner.db") == []


def test_a_command_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    """kill -9 on the parent of two workers: they end their trials and go."""
    study_file(tmp_path, model=SLOW, spec='name="tiny", epochs=1000')
    storage = tmp_path / "tuner.db"
    process = start("--study", "tiny.py", "--workers", "2", "--lanes", "1", cwd=tmp_path)
    try:
        wait_for(lambda: len(running(storage)) == 2, process)
        process.kill()
        process.communicate(timeout=60)
        wait_until_gone(process.pid)
    finally:
        end_group(process)
    found = trials(storage)
    assert {t.state for t in found} == {TrialState.FAIL}
    ends = {t.user_attrs["reason"] for t in found}
    assert ends <= {"interrupted: the command was ended", "interrupted: nobody waits for it any more"}


def test_workers_that_die_at_once_end_the_run(tmp_path: Path) -> None:
    """A study file that ends its process is not started for ever: one line, exit code 1, nothing left running."""
    study_file(
        tmp_path,
        head="import multiprocessing",
        data="if multiprocessing.parent_process() is not None: os._exit(7)\n" + "x = torch.ones(4, 3)\n"
        "return Splits((x, x[:, :1]), (x, x[:, :1]))",
    )
    done = run("--study", "tiny.py", "--workers", "2", "--n-trials", "4", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: 3 workers in a row died before they finished a trial")
    assert "exit code 7" in done.stderr.splitlines()[-1]
    assert states(tmp_path / "tuner.db") == []


def test_an_error_in_a_worker_is_the_commands_error(tmp_path: Path) -> None:
    """Ten failures in a row in one worker stop the whole command with their cause."""
    study_file(
        tmp_path,
        head="import multiprocessing",
        model="if multiprocessing.parent_process() is not None: raise ValueError('boom')\nreturn nn.Linear(3, 1)",
    )
    done = run("--study", "tiny.py", "--workers", "2", "--n-trials", "90", "--lanes", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert "10 trials failed in a row, the last one with: ValueError: boom (tiny.py:" in done.stderr.splitlines()[-1]
    assert set(states(tmp_path / "tuner.db")) == {"FAIL"}
    assert len(states(tmp_path / "tuner.db")) < 25
