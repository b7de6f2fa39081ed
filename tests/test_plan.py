"""The plan: what is timed, what is remembered, and what is chosen for how much there is to do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_files import study_file

from tuner.assemble import Assembler
from tuner.measure import remembered, time_ways
from tuner.plan import Choice, Scope, Timing, choose
from tuner.spec import explore
from tuner.study_file import load_spec

SCOPE = Scope(
    goal=1000, epochs=20, workers=(1, 2), threads=(1, 2), lanes=(1, 4, 16, 64), learning=True, start=4.0, step_flops=2e6
)
TIMINGS = (
    Timing(1, 1, 0.020),
    Timing(1, 2, 0.020),
    Timing(4, 1, 0.010, 4),
    Timing(16, 1, 0.004, 16),
    Timing(64, 1, 0.002, 64),
    Timing(64, 2, 0.0014, 64),
)


def numbers(choice: Choice) -> tuple[int, int, int]:
    return choice.workers, choice.threads, choice.lanes


def test_much_work_takes_all_workers_and_the_widest_stacks() -> None:
    """2,000 trials of 20 epochs: two workers of 64 lanes each, one thread each."""
    assert numbers(choose(TIMINGS, replace(SCOPE, goal=2000))) == (2, 1, 64)


@pytest.mark.parametrize(
    ("goal", "workers", "lanes"), [(3, 1, 3), (50, 1, 9), (200, 1, 18), (200, 2, 9), (5000, 2, 64)]
)
def test_a_sampler_that_learns_asks_for_few_at_once(goal: int, workers: int, lanes: int) -> None:
    """Some, and one more for each sixteen to come; shared by the workers; all that there are where nothing learns."""
    assert replace(SCOPE, goal=goal).widest(workers) == lanes
    assert replace(SCOPE, goal=goal, learning=False).widest(workers) == min(64, goal // workers)


def test_little_work_is_not_worth_another_workers_start() -> None:
    """50 trials: one worker, and as many lanes as leave the sampler its generations."""
    assert numbers(choose(TIMINGS, replace(SCOPE, goal=50))) == (1, 1, 9)


def test_a_sampler_that_does_not_learn_gets_all_its_trials_at_once() -> None:
    """50 trials at random: one generation, in the widest stack that was timed or a narrower one."""
    assert numbers(choose(TIMINGS, replace(SCOPE, goal=50, learning=False))) == (1, 1, 50)


def test_more_threads_are_taken_where_they_gain_much() -> None:
    """1.4 times is enough for one worker; 1.2 times is not: such threads stand still beside other programs."""
    one = replace(SCOPE, workers=(1,))
    assert numbers(choose(TIMINGS, one)) == (1, 2, 64)
    less = (*TIMINGS[:-1], Timing(64, 2, 0.0017, 64))
    assert numbers(choose(less, one)) == (1, 1, 64)


def test_stacks_that_do_not_pay_are_left_alone() -> None:
    """Lone trials are kept where a stack gains less than what can go wrong with it."""
    timings = (Timing(1, 1, 0.1), Timing(16, 1, 0.095, 16), Timing(64, 1, 0.2, 64))
    assert numbers(choose(timings, SCOPE)) == (2, 1, 1)


def test_what_was_asked_for_is_kept() -> None:
    """Lanes as asked for, also when they leave few generations; the rest is chosen."""
    scope = replace(SCOPE, goal=20, lanes=(16,))
    assert numbers(choose(TIMINGS, scope))[2] == 16
    assert numbers(choose([], scope)) == (1, 1, 16)


def test_timings_are_remembered() -> None:
    """The second call measures nothing."""
    made = [Timing(1, 1, 0.1), Timing(4, 1, 0.05, 4)]
    assert remembered("a study of test_plan", lambda: made) == (made, False)
    assert remembered("a study of test_plan", lambda: []) == (made, True)
    assert remembered("another study", lambda: made[:1]) == (made[:1], False)


def test_a_broken_memory_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is no list of timings is as good as none; one that cannot be written does no harm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remembered("key", lambda: [Timing(1, 1, 0.1)])[1] is False
    (file,) = (tmp_path / "tuner").iterdir()
    for text in ("", "{", "[1]", '[{"lanes": 1}]'):
        file.write_text(text)
        assert remembered("key", lambda: [Timing(1, 1, 0.2)]) == ([Timing(1, 1, 0.2)], False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert remembered("key", lambda: [Timing(1, 1, 0.1)])[1] is False


def test_timing_covers_lone_trials_and_stacks_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default study: lone trials and stacks are timed; a small goal is not worth measuring everything for."""
    monkeypatch.setattr("tuner.measure.MOST_SECONDS", 1e9)
    monkeypatch.setattr("tuner.measure.SHARE", 1e9)
    loaded = load_spec("digits_mlp")
    from tuner.data import prepare

    device = torch.device("cpu")
    task = loaded.spec.task(prepare(loaded.spec.data(), device, loaded.origin), device)
    jobs = [loaded.spec.job(i, h) for i, h in enumerate(explore(loaded).samples)]
    scope = replace(SCOPE, threads=(1,), lanes=(1, 4, 16))
    timings = time_ways(task, jobs, scope, Assembler(task))
    assert {(t.lanes, t.threads) for t in timings} == {(1, 1), (4, 1), (16, 1)}
    assert all(t.seconds > 0 for t in timings)
    monkeypatch.setattr("tuner.measure.SHARE", 1e-9)
    few = time_ways(task, jobs, replace(scope, goal=1), Assembler(task))
    assert [(t.lanes, t.threads) for t in few] == [(1, 1)]


def test_plan_show_prints_what_was_measured_and_starts_nothing(tmp_path: Path) -> None:
    """A table, or one JSON document; no storage is made."""
    study_file(tmp_path)
    command = [sys.executable, "-m", "tuner.run", "--study", "tiny.py", "--n-trials", "100", "--plan", "show"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("plan     cpu ")
    assert "trial-epochs/s" in ran.stdout
    document = json.loads(
        subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    )
    assert document["plan"]["workers"] >= 1
    assert {"lanes", "threads", "trial_epochs_per_second", "in_stacks"} <= document["measured"][0].keys()
    assert not (tmp_path / "tuner.db").exists()
