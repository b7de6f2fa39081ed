"""A study is resumed if it is the same one, and refused, untouched, if it is not."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from torch import nn

from tuner import StudySpec
from tuner.errors import StudyMismatchError, UsageError
from tuner.results import Target
from tuner.spec import LoadedSpec, Space, explore
from tuner.storage import Storage, open_storage, resolve_url
from tuner.study import (
    FINGERPRINT,
    RUNS,
    OpenedStudy,
    describe,
    enqueue_grid,
    enqueue_points,
    open_study,
    read_points,
    target_of,
)

Suggest = Callable[[optuna.Trial], dict[str, Any]]


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [2, 4]),
    }


def make(suggest: Suggest = space, **changed: Any) -> LoadedSpec:
    spec = StudySpec(
        name="tiny",
        data=lambda: None,  # type: ignore[arg-type, return-value]
        space=suggest,
        model=lambda hyperparameters: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        metrics={"accuracy": lambda output, target: torch.tensor(1.0)},
        epochs=3,
    )
    return LoadedSpec(dataclasses.replace(spec, **changed), "/some/tiny.py", "/some/tiny.py", "What it **is**.")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.db"


@pytest.fixture
def storage(path: Path) -> Storage:
    return open_storage(resolve_url(str(path), {}, path.parent))


def opened(storage: Storage, loaded: LoadedSpec | None = None, digest: str = "d1", **arguments: Any) -> OpenedStudy:
    loaded = loaded or make()
    target = arguments.pop("target", None) or target_of(loaded.spec)
    return open_study(storage, loaded, explore(loaded), digest, target, **arguments)


def content(path: Path) -> list[str]:
    """Every row of every table."""
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def add_trial(study: optuna.Study, value: float = 0.5) -> None:
    trial = study.ask()
    space(trial)
    study.tell(trial, value)


def test_the_same_spec_resumes_its_study(storage: Storage) -> None:
    """The second opening finds the first one's trials, and says that it resumed."""
    first = opened(storage)
    assert (first.resumed, first.run, first.summary.done) == (False, 0, 0)
    add_trial(first.study, 0.5)
    add_trial(first.study, 0.25)
    second = opened(storage)
    assert (second.resumed, second.study_id) == (True, first.study_id)
    assert second.summary.complete == 2
    assert second.summary.best is not None
    assert second.summary.best.values == [0.25]


def test_opening_a_storage_again_keeps_the_locks_of_the_first(storage: Storage, path: Path) -> None:
    """Where a process closes a file itself it loses its locks (POSIX): others then took the write-ahead log away."""
    found = opened(storage)
    again = open_storage(storage.given_url, create=False)
    script = f"""
import contextlib, sqlite3
with contextlib.closing(sqlite3.connect({str(path)!r})) as connection:
    connection.execute("SELECT count(*) FROM trials").fetchone()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert path.with_name(f"{path.name}-wal").exists()
    add_trial(found.study)
    again.close()
    storage.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM trials").fetchone() == (1,)


def test_each_opening_is_counted(storage: Storage) -> None:
    """Runs have numbers, from which samplers get seeds of their own."""
    assert [opened(storage).run for _ in range(3)] == [0, 1, 2]
    assert storage.get_study_system_attrs(opened(storage).study_id)[RUNS] == 4
    assert opened(storage, name="another").run == 0


def test_the_storage_says_what_the_study_is(storage: Storage) -> None:
    """Names of its values, a note for the dashboard, its file, and the fingerprint."""
    study = opened(storage).study
    attributes = storage.get_study_system_attrs(study._study_id)
    assert study.metric_names == ["validation loss"]
    assert study.user_attrs == {"study file": "/some/tiny.py"}
    note = "".join(value for name, value in sorted(attributes.items()) if name.startswith("dashboard:note_str"))
    assert "What it **is**." in note
    assert "validation loss" in note
    assert "wall_time" in note
    assert attributes[FINGERPRINT] == {
        "objectives": ["loss:minimize"],
        "space": attributes[FINGERPRINT]["space"],
        "data": "d1",
        "epochs": 3,
        "seed": 0,
    }
    assert set(attributes[FINGERPRINT]["space"]) == {"lr", "batch_size"}


def test_several_objectives_have_names_and_directions(storage: Storage) -> None:
    """Each as it was asked for."""
    loaded = make()
    study = opened(storage, loaded, target=target_of(loaded.spec, ["accuracy:maximize", "wall_time"])).study
    assert study.metric_names == ["validation accuracy", "wall_time"]
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]


def variant(**changed: Any) -> Suggest:
    """The search space with some distributions changed, renamed or left out (None)."""
    parts: dict[str, Any] = {
        "lr": lambda trial: trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "batch_size": lambda trial: trial.suggest_categorical("batch_size", [2, 4]),
    } | changed

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        found = {name: part(trial) for name, part in parts.items() if part is not None}
        return {"lr": 0.1, "batch_size": 2, **found}

    return suggest


CHANGES: dict[str, tuple[LoadedSpec, str, list[str]]] = {
    "direction": (
        make(objective="accuracy", direction="maximize"),
        "d1",
        ["it was to minimize, now maximize"],
    ),
    "objective": (make(objective="accuracy"), "d1", ["loss:minimize", "accuracy:minimize"]),
    "choices": (
        make(variant(batch_size=lambda trial: trial.suggest_categorical("batch_size", [2, 4, 8]))),
        "d1",
        ["batch_size was one of 2, 4, now one of 2, 4, 8"],
    ),
    "range": (
        make(variant(lr=lambda trial: trial.suggest_float("lr", 1e-3, 2.0, log=True))),
        "d1",
        ["lr was 0.001 to 1.0 (log), now 0.001 to 2.0 (log)"],
    ),
    "log": (
        make(variant(lr=lambda trial: trial.suggest_float("lr", 1e-3, 1.0))),
        "d1",
        ["lr was 0.001 to 1.0 (log), now 0.001 to 1.0"],
    ),
    "type": (
        make(variant(batch_size=lambda trial: trial.suggest_int("batch_size", 2, 4))),
        "d1",
        ["batch_size was one of 2, 4, now whole numbers 2 to 4"],
    ),
    "renamed": (
        make(variant(lr=lambda trial: trial.suggest_float("rate", 1e-3, 1.0, log=True))),
        "d1",
        ["lr was 0.001 to 1.0 (log), now not there", "rate was not there, now 0.001 to 1.0 (log)"],
    ),
    "removed": (make(variant(batch_size=None)), "d1", ["batch_size was one of 2, 4, now not there"]),
    "added": (
        make(variant(momentum=lambda trial: trial.suggest_float("momentum", 0.0, 0.9, step=0.1))),
        "d1",
        ["momentum was not there, now 0.0 to 0.9 (step 0.1)"],
    ),
    "data": (make(), "d2", ["the data are others"]),
    "epochs": (make(epochs=5), "d1", ["epochs were 3, now 5"]),
    "seed": (make(seed=7), "d1", ["seed was 0, now 7"]),
    "two changes": (make(epochs=5, seed=7), "d2", ["epochs were 3, now 5", "seed was 0, now 7", "the data are others"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_study_is_refused_before_anything_is_written(change: str, storage: Storage, path: Path) -> None:
    """What it was and what it is now, the file, the way out; and not a row of the storage has changed."""
    add_trial(opened(storage).study)
    before = content(path)
    loaded, digest, words = CHANGES[change]
    with pytest.raises(StudyMismatchError) as caught:
        opened(storage, loaded, digest)
    message = str(caught.value)
    for word in (*words, "'tiny'", str(path), "/some/tiny.py", "--study-name"):
        assert word in message
    assert "\n" not in message
    assert content(path) == before
    assert opened(storage, loaded, digest, name="fresh").resumed is False


def test_a_second_objective_is_refused(storage: Storage) -> None:
    """The number of objectives is part of a study."""
    opened(storage)
    with pytest.raises(StudyMismatchError, match="it was to minimize, now minimize and minimize"):
        opened(storage, target=Target(("loss", "wall_time"), (False, False)))


def test_what_changes_nothing_that_is_learned_changes_no_study(storage: Storage) -> None:
    """Another description, another file: the same study."""
    opened(storage)
    assert opened(storage, dataclasses.replace(make(), source="/else/where.py", description="New words.")).resumed


def plain(path: Path, trials: int = 3, suggest: Suggest = space, **arguments: Any) -> optuna.Study:
    """A study as a plain Optuna script begins it."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=f"sqlite:///{path}", study_name="tiny", **arguments)

    def objective(trial: optuna.Trial) -> float:
        suggest(trial)
        return float(trial.number + 1)

    study.optimize(objective, n_trials=trials)
    optuna.logging.set_verbosity(verbosity)
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    return study


def test_a_study_that_plain_optuna_began_is_continued(path: Path) -> None:
    """Its trials count, and from now on it has a fingerprint like any other."""
    plain(path)
    storage = open_storage(resolve_url(str(path), {}, path.parent))
    found = opened(storage)
    assert (found.resumed, found.summary.complete) == (True, 3)
    assert found.summary.best is not None
    assert found.summary.best.number == 0
    assert FINGERPRINT in storage.get_study_system_attrs(found.study_id)
    with pytest.raises(StudyMismatchError, match="epochs were 3, now 4"):
        opened(storage, make(epochs=4))


@pytest.mark.parametrize(
    ("arguments", "suggest", "words"),
    [
        ({"direction": "maximize"}, space, "it was to maximize, now minimize"),
        ({"directions": ["minimize", "maximize"]}, None, "it was to minimize and maximize, now minimize"),
        (
            {},
            variant(batch_size=lambda trial: trial.suggest_categorical("batch_size", [2, 8])),
            "batch_size was one of 2, 8, now one of 2, 4",
        ),
        (
            {},
            variant(lr=lambda trial: trial.suggest_float("lr", 0.0, 1.0)),
            "lr was 0.0 to 1.0, now 0.001 to 1.0 (log)",
        ),
    ],
)
def test_a_plain_study_that_optuna_could_not_continue_is_refused(
    arguments: dict[str, Any], suggest: Suggest | None, words: str, path: Path
) -> None:
    """Direction, choices and log flag are those of the spec, or nothing is written."""
    plain(path, trials=3 if suggest else 0, suggest=suggest or space, **arguments)
    storage = open_storage(resolve_url(str(path), {}, path.parent))
    before = content(path)
    with pytest.raises(StudyMismatchError) as caught:
        opened(storage)
    assert words in str(caught.value)
    assert content(path) == before


@pytest.mark.parametrize(
    ("objectives", "names", "maximize"),
    [
        (None, ("loss",), (False,)),
        (["loss", "wall_time"], ("loss", "wall_time"), (False, False)),
        (["accuracy:maximize", "loss"], ("accuracy", "loss"), (True, False)),
        (["loss:maximize"], ("loss",), (True,)),
    ],
)
def test_objectives_are_named_on_the_command_line(objectives: Any, names: Any, maximize: Any) -> None:
    """`name` where its direction is known, else `name:direction`; without any, the spec's own."""
    assert target_of(make().spec, objectives) == Target(names, maximize)


def test_the_direction_of_the_specs_own_objective_is_known() -> None:
    """A spec that maximizes a metric need not be told twice."""
    spec = make(objective="accuracy", direction="maximize").spec
    assert target_of(spec) == Target(("accuracy",), (True,))
    assert target_of(spec, ["accuracy", "wall_time"]) == Target(("accuracy", "wall_time"), (True, False))


@pytest.mark.parametrize(
    ("objectives", "words"),
    [
        (["speed"], "wanted one of loss, accuracy, wall_time"),
        (["loss:down"], "wanted one of loss"),
        (["accuracy"], "say accuracy:maximize or accuracy:minimize"),
        (["loss", "loss"], "each objective once"),
        (["loss", "loss:maximize"], "each objective once"),
    ],
)
def test_objectives_that_nothing_measures_are_refused(objectives: list[str], words: str) -> None:
    """One line with what there is."""
    with pytest.raises(UsageError, match=words):
        target_of(make().spec, objectives)


@pytest.mark.parametrize(
    ("distribution", "text"),
    [
        (FloatDistribution(0.001, 1.0, log=True), "0.001 to 1.0 (log)"),
        (FloatDistribution(0.0, 1.0, step=0.25), "0.0 to 1.0 (step 0.25)"),
        (IntDistribution(1, 9), "whole numbers 1 to 9"),
        (IntDistribution(0, 8, step=2), "whole numbers 0 to 8 (step 2)"),
        (IntDistribution(1, 64, log=True), "whole numbers 1 to 64 (log)"),
        (CategoricalDistribution(["a", None, 2]), "one of a, None, 2"),
    ],
)
def test_a_distribution_reads_well(distribution: Any, text: str) -> None:
    """As a person would say it."""
    assert describe(distribution) == text


def points_of(text: str, tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "points.json"
    file.write_text(text)
    return read_points(file, explore(make()))


def test_points_are_read_from_json(tmp_path: Path) -> None:
    """A list of points, or one alone; a point may leave parameters to the sampler."""
    both = [{"lr": 0.5, "batch_size": 4}, {"lr": 0.25}]
    assert points_of(json.dumps(both), tmp_path) == both
    assert points_of('{"lr": 1}', tmp_path) == [{"lr": 1}]
    assert points_of("[]", tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr=1", "wanted a JSON list of dictionaries"),
        ("[3]", "wanted dictionaries of parameters; found 3"),
        ('{"rate": 1}', "no parameter 'rate'; the search space has batch_size, lr"),
        ('{"lr": 2}', "lr = 2 is outside 0.001 to 1.0 (log)"),
        ('{"lr": "much"}', 'lr = "much" is outside'),
        ('{"lr": null}', "lr = null is outside"),
        ('{"lr": [0.1]}', "lr = [0.1] is outside"),
        ('{"lr": NaN}', "lr = NaN is outside"),
        ('{"batch_size": 3}', "batch_size = 3 is outside one of 2, 4"),
        ('{"batch_size": [2]}', "batch_size = [2] is outside one of 2, 4"),
    ],
)
def test_wrong_points_are_one_line(text: str, words: str, tmp_path: Path) -> None:
    """The file, what was wanted and what was found."""
    with pytest.raises(UsageError) as caught:
        points_of(text, tmp_path)
    assert str(caught.value).startswith(f"--enqueue {tmp_path / 'points.json'}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_queued_points_come_first_and_as_they_were_given(storage: Storage) -> None:
    """The next trials are those points, in their order; a missing parameter is sampled."""
    study = opened(storage).study
    enqueue_points(study, [{"lr": 0.5, "batch_size": 4}, {"lr": 0.25}])
    for _ in range(3):
        add_trial(study)
    first, second, third = study.trials
    assert first.params == {"lr": 0.5, "batch_size": 4}
    assert second.params["lr"] == 0.25
    assert third.params["lr"] not in (0.5, 0.25)


def test_the_cells_of_a_grid_are_queued_once(storage: Storage) -> None:
    """A second call queues what is not there: nothing, while all wait or are done; a failed cell comes again."""
    grid = Space({"lr": FloatDistribution(0.0, 0.3, step=0.1), "batch_size": CategoricalDistribution([2, 4])}, [])
    found = opened(storage)
    assert enqueue_grid(storage, found, grid) == 8
    assert enqueue_grid(storage, found, grid) == 0
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL):
        trial = found.study.ask()
        trial.suggest_float("lr", 0.0, 0.3, step=0.1)
        trial.suggest_categorical("batch_size", [2, 4])
        found.study.tell(trial, 1.0 if state == TrialState.COMPLETE else None, state=state)
    assert enqueue_grid(storage, found, grid) == 1
    assert enqueue_grid(storage, found, grid) == 0
