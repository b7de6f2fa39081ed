"""``--pruner halving``: which trials go on at a rung, and that all of one age are compared with each other."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from tests.study_files import run, study_file, trials
from tuner.halving import Cohort, ranked, rungs_of
from tuner.options import parser, wishes_of
from tuner.run import main
from tuner.stack import Stack

SPACE = """
        return {
            "lr": 0.0,
            "batch_size": 7,
            "level": trial.suggest_float("level", 0.0, 1e30),
            "kind": trial.suggest_categorical("kind", ["plain", "wrapped"]),
        }
"""
MODEL = """
        layer = nn.Linear(3, 1)
        with torch.no_grad():
            layer.weight.fill_(1 + hyperparameters["level"])
            layer.bias.zero_()
        return layer if hyperparameters["kind"] == "plain" else nn.Sequential(layer, nn.Identity())
"""
"""The target is the sum of the inputs: the loss grows with the level, and is infinite at 1e30. Nothing is learned."""

Point = dict[str, Any]
Halve = Callable[..., list[FrozenTrial]]


def levels(count: int, kind: str = "plain") -> list[Point]:
    """So many points in an order that is none."""
    return [{"level": (7 * i % count + 1) / count, "kind": kind} for i in range(count)]


def expected(points: list[Point], kept: int) -> set[int]:
    """The numbers of the best ones."""
    return set(sorted(range(len(points)), key=lambda number: points[number]["level"])[:kept])


@pytest.fixture
def halve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Halve:
    """Train these points by halving, all of them at once if nothing else is said; gives the study's trials."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(points: list[Point], epochs: int, *arguments: str, lanes: int | None = None, **parts: str) -> Any:
        study_file(tmp_path, space=SPACE, model=MODEL, **{"spec": f'name="tiny", epochs={epochs}', **parts})
        (tmp_path / "points.json").write_text(json.dumps(points))
        shared = ["--study", "tiny.py", "--enqueue", "points.json", "--n-trials", str(len(points))]
        shared += ["--pruner", "halving", "--sampler", "random", "--lanes", str(lanes or len(points)), *arguments]
        code = main(shared)
        said = capsys.readouterr()
        assert code == 0, said.err
        return trials(tmp_path / "tuner.db")

    return call


def survivors(found: list[FrozenTrial], epochs: int) -> set[int]:
    """Those that have trained for more than so many epochs."""
    return {t.number for t in found if t.user_attrs["epochs"] > epochs}


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_of_64_trials_16_train_on_and_4_to_the_end(direction: str, halve: Halve, tmp_path: Path) -> None:
    """Exactly 64 * 1 + 16 * 4 + 4 * 15 epochs are trained, by the best; the others say their place."""
    points = levels(64)
    parts = {}
    if direction == "maximize":
        parts["metric"] = "return -(output - target).abs().mean()"
        parts["spec"] = 'name="tiny", epochs=20, objective="error", direction="maximize"'
    found = halve(points, 20, **parts)
    assert sum(t.user_attrs["epochs"] for t in found) == 64 * 1 + 16 * 4 + 4 * 15
    assert Counter(t.user_attrs["epochs"] for t in found) == {1: 48, 5: 12, 20: 4}
    assert survivors(found, 1) == expected(points, 16)
    assert survivors(found, 5) == expected(points, 4)
    order = sorted(range(64), key=lambda number: points[number]["level"])
    for trial in found:
        epochs, place = trial.user_attrs["epochs"], order.index(trial.number) + 1
        assert sorted(trial.intermediate_values) == list(range(epochs))
        if epochs == 20:
            assert trial.state == TrialState.COMPLETE
            assert "reason" not in trial.user_attrs
            continue
        assert trial.state == TrialState.PRUNED
        assert trial.value == trial.intermediate_values[epochs - 1]
        text = f"place {place} of 64, 16 go on" if epochs == 1 else f"place {place} of 16, 4 go on"
        assert trial.user_attrs["reason"] == f"pruned at epoch {epochs - 1}: {text}"
    with closing(sqlite3.connect(tmp_path / "tuner.db")) as connection:
        states = connection.execute("SELECT state, count(*) FROM trials GROUP BY state ORDER BY state").fetchall()
    assert states == [("COMPLETE", 4), ("PRUNED", 60)]


def test_lanes_in_different_stacks_are_compared_with_each_other(halve: Halve) -> None:
    """All good trials have one structure, all bad ones another: each stack for itself would keep two of eight."""
    points = [{"level": 0.1 * i, "kind": "plain"} for i in range(8)]
    points += [{"level": 10.0 + i, "kind": "wrapped"} for i in range(8)]
    found = halve(points, 4)
    assert {t.user_attrs["lanes"] for t in found} == {8}
    assert survivors(found, 1) == {0, 1, 2, 3}


def test_of_equal_trials_the_older_ones_go_on(halve: Halve) -> None:
    """A tie is broken by number, so that a run can be repeated."""
    assert survivors(halve([{"level": 0.5, "kind": "plain"}] * 9, 4), 1) == {0, 1}


def test_trials_that_diverge_count_as_the_worst_of_their_rung(halve: Halve) -> None:
    """Half of sixteen have no finite loss: the four best of all still go on, and no more."""
    points = levels(16)
    for number in range(0, 16, 2):
        points[number]["level"] = 1e30
    found = halve(points, 4)
    assert survivors(found, 1) == expected(points, 4)
    assert Counter(t.user_attrs["reason"].partition(" at ")[0] for t in found if t.state == TrialState.PRUNED) == {
        "training loss is inf": 8,
        "pruned": 4,
    }


def test_a_stack_that_fails_is_waited_for_and_compared_with_the_rest(
    halve: Halve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials start again in smaller stacks; those that are at the rung already wait, and nothing is decided twice.

    The good trials are those of the stack that fails, twice: before the first rung, and on the way to the second.
    """
    epoch, failures = Stack.epoch, []

    def fails(self: Stack, watch: Any) -> Any:
        if 16 in self.numbers and self._epoch in (0, 2) and self._epoch not in failures:
            failures.append(self._epoch)
            raise RuntimeError("this stack fails")
        return epoch(self, watch)

    monkeypatch.setattr(Stack, "epoch", fails)
    points = [{"level": 10.0 + i, "kind": "plain"} for i in range(16)] + levels(16, "wrapped")
    points[16]["level"] = 0.0
    found = halve(points, 16)
    assert failures == [0, 2]
    assert Counter(t.user_attrs["epochs"] for t in found) == {1: 24, 4: 6, 16: 2}
    assert survivors(found, 1) == expected(points, 8)
    assert survivors(found, 4) == expected(points, 2)
    for trial in found:
        assert len(trial.intermediate_values) == trial.user_attrs["epochs"]


def test_a_trial_that_another_process_ends_is_not_waited_for(halve: Halve, tmp_path: Path) -> None:
    """It leaves its cohort, which is one smaller: of the other seven the best one goes on."""
    thief = """
        if os.path.exists("tuner.db"):
            with sqlite3.connect("tuner.db", timeout=30) as other:
                other.execute("UPDATE trials SET state = 'FAIL' WHERE number = 3 AND state = 'RUNNING'")
            other.close()
        return nn.functional.mse_loss(output, target)
    """
    points = levels(8)
    points[3]["level"] = 0.0
    found = halve(points, 4, head="import sqlite3", loss=thief)
    assert found[3].state == TrialState.FAIL
    rest = {number: point["level"] for number, point in enumerate(points) if number != 3}
    assert {t.number for t in found if t.state == TrialState.COMPLETE} == {min(rest, key=lambda n: rest[n])}
    assert {t.user_attrs["reason"].partition(" of ")[2] for t in found if t.state == TrialState.PRUNED} == {
        "7, 1 go on"
    }


def test_each_run_compares_its_own_trials(halve: Halve) -> None:
    """A study is resumed with worse trials: the best quarter of them goes on, though all were beaten before."""
    halve(levels(16), 4)
    worse = [{**point, "level": 50 + point["level"]} for point in levels(16)]
    found = halve(worse, 4)
    assert survivors(found[16:], 1) == {16 + number for number in expected(worse, 4)}


def test_one_lane_is_compared_with_all_that_were_at_the_rung(halve: Halve) -> None:
    """The asynchronous rule: the best one so far goes on; one that is not among the best is pruned."""
    found = halve([{"level": level, "kind": "plain"} for level in (5.0, 4.0, 3.0, 6.0, 2.0, 3.5)], 4, lanes=1)
    assert [t.state.name for t in found] == ["COMPLETE"] * 3 + ["PRUNED", "COMPLETE", "PRUNED"]
    assert [t.user_attrs.get("reason") for t in found][3::2] == ["pruned at epoch 0"] * 2


def test_three_lanes_are_too_few_for_a_quarter(halve: Halve) -> None:
    """Each of three is compared with all of the study: the best one goes on."""
    found = halve([{"level": level, "kind": "plain"} for level in (5.0, 3.0, 4.0)], 4)
    assert [t.state.name for t in found] == ["PRUNED", "COMPLETE", "PRUNED"]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_has_cohorts_of_its_own(workers: int, tmp_path: Path) -> None:
    """Of each cohort all places from the first loser to the last one are there, as often as there are such cohorts."""
    space = SPACE.replace("return {", "time.sleep(0.03)\n        return {").replace("1e30", "1.0")
    study_file(tmp_path, space=space, model=MODEL, spec='name="tiny", epochs=4')
    arguments = ["--study", "tiny.py", "--n-trials", "48", "--pruner", "halving", "--sampler", "random"]
    done = run(*arguments, "--lanes", "16", "--workers", str(workers), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = trials(tmp_path / "tuner.db")
    assert len({t.user_attrs["worker"] for t in found}) == workers
    places: dict[tuple[str, int], Counter[int]] = {}
    for trial in found:
        match = re.fullmatch(
            r"pruned at epoch 0: place (\d+) of (\d+), (\d+) go on", trial.user_attrs.get("reason", "")
        )
        if match is not None:
            place, count, kept = map(int, match.groups())
            assert kept == count // 4
            places.setdefault((trial.user_attrs["worker"], count), Counter())[place] += 1
    assert len({worker for worker, _ in places}) == workers
    for (_, count), seen in places.items():
        assert set(seen) == set(range(count // 4 + 1, count + 1))
        assert len(set(seen.values())) == 1


def test_a_time_is_not_halved(halve: Halve) -> None:
    """Where an epoch has no value of what is optimized, no trial is pruned."""
    assert {t.state for t in halve(levels(8), 4, "--objectives", "wall_time")} == {TrialState.COMPLETE}


@pytest.mark.parametrize(
    ("epochs", "rungs"), [(1, ()), (2, (1,)), (3, (1,)), (4, (1,)), (8, (2,)), (20, (1, 5)), (64, (4, 16))]
)
def test_rungs_are_a_sixteenth_and_a_quarter_of_the_epochs(epochs: int, rungs: tuple[int, ...]) -> None:
    """A training of fewer than sixteen epochs has one rung, and one of a single epoch none."""
    assert rungs_of(epochs) == rungs


def test_a_number_that_is_none_is_the_worst() -> None:
    """In both directions, and of several the older one first."""
    values = {3: math.nan, 1: 0.5, 2: math.inf, 0: math.nan, 4: 0.5, 5: 0.1}
    assert ranked(values, maximize=False) == [5, 1, 4, 2, 0, 3]
    assert ranked(values, maximize=True) == [2, 1, 4, 5, 0, 3]


def test_a_cohort_is_compared_once_at_each_rung() -> None:
    """Those that have diverged count for the segment in which they did."""
    cohort = Cohort((1, 4), diverged=4)
    assert cohort.losers({0: 0.3, 1: 0.1, 2: 0.2, 3: 0.4}, maximize=False) == {
        0: "place 3 of 8, 2 go on",
        3: "place 4 of 8, 2 go on",
    }
    assert (cohort.rung, cohort.diverged) == (4, 0)
    assert cohort.losers({1: 0.1, 2: 0.2}, maximize=False) is None
    assert cohort.rung is None


def test_halving_may_start_all_trials_at_once() -> None:
    """Other searches keep lanes for what they learn; halving learns at the rung."""
    options = ["--n-trials", "40", "--pruner"]
    assert not wishes_of(parser().parse_args([*options, "halving"])).learning
    assert wishes_of(parser().parse_args([*options, "median"])).learning
