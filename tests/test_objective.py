"""The same training as an ordinary Optuna objective."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

import tuner
from tests.study_files import study_file, trials
from tuner.errors import DeviceError, SpecError, UsageError
from tuner.objective import Objective
from tuner.run import main
from tuner.study_file import load_spec


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading a study file makes its neighbours importable: for this test only. Optuna's lines are not shown."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    yield
    optuna.logging.set_verbosity(before)


def optimized(objective: Objective, trial_count: int, **arguments: Any) -> optuna.Study:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3), **arguments)
    study.optimize(objective, n_trials=trial_count)
    return study


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "digits_search", "diabetes_mlp"])
def test_the_objective_gives_the_value_of_a_run_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same hyperparameters, one CPU thread, a lone trial: equal values and learning curves, for each study file."""
    import dataclasses
    import json

    spec = dataclasses.replace(load_spec(name).spec, epochs=3)
    study = optimized(Objective(spec, device="cpu"), 2)
    (tmp_path / "points.json").write_text(json.dumps([t.params for t in study.trials]))
    (tmp_path / "short.py").write_text(
        f"import dataclasses\nfrom tuner.study_file import load_spec\n"
        f"spec = dataclasses.replace(load_spec({name!r}).spec, epochs=3)\n"
    )
    where = ["--device", "cpu", "--threads", "1", "--lanes", "1", "--pruner", "none"]
    assert main(["--study", "short.py", "--n-trials", "2", "--enqueue", "points.json", *where]) == 0
    capsys.readouterr()
    found = trials(tmp_path / "tuner.db", spec.name)
    assert [t.params for t in found] == [t.params for t in study.trials]
    assert [t.values for t in found] == [t.values for t in study.trials]
    assert [t.intermediate_values for t in found] == [t.intermediate_values for t in study.trials]


def test_the_objective_stores_what_a_run_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same attributes, but for who trained it and where its weights are; parts of the time add up."""
    study_file(tmp_path)
    assert main(["--study", "tiny.py", "--n-trials", "1", "--pruner", "none"]) == 0
    capsys.readouterr()
    study = optimized(tuner.Objective(load_spec("tiny.py").spec, device="cpu"), 1)
    ours = set(trials(tmp_path / "tuner.db")[0].user_attrs) - {"worker", "weights"}
    (trial,) = study.trials
    assert set(trial.user_attrs) == ours
    a = trial.user_attrs
    parts = sum(a[f"{part}_seconds"] for part in ("build", "train", "validate", "wait"))
    assert parts == pytest.approx(a["wall_time"], rel=0.02)
    assert trial.value == a["validation_loss"] == trial.intermediate_values[a["best_epoch"]]


def test_the_objective_prunes(tmp_path: Path) -> None:
    """As the study's pruner says, with the epoch as the reason."""
    study_file(tmp_path)
    pruner = optuna.pruners.ThresholdPruner(upper=-1.0)
    study = optimized(Objective(load_spec("tiny.py").spec, device="cpu"), 2, pruner=pruner)
    assert [t.state for t in study.trials] == [TrialState.PRUNED] * 2
    assert [t.user_attrs["reason"] for t in study.trials] == ["pruned at epoch 0"] * 2
    assert [t.user_attrs["epochs"] for t in study.trials] == [1, 1]


def test_a_diverged_trial_is_pruned_with_its_reason(tmp_path: Path) -> None:
    """No NaN and no infinity is reported or becomes a value; the study goes on."""
    study_file(
        tmp_path,
        space='return {"lr": trial.suggest_categorical("lr", [1e6, 0.1]), "batch_size": 4}',
        spec='name="tiny", epochs=12',
    )
    objective = Objective(load_spec("tiny.py").spec, device="cpu")
    study = optuna.create_study()
    for lr in (1e6, 0.1):
        study.enqueue_trial({"lr": lr})
    study.optimize(objective, n_trials=2)
    first, second = study.trials
    assert (first.state, second.state) == (TrialState.PRUNED, TrialState.COMPLETE)
    epoch = first.user_attrs["epochs"] - 1
    assert first.user_attrs["reason"].endswith((f"loss is nan at epoch {epoch}", f"loss is inf at epoch {epoch}"))
    assert study.best_trial.number == 1


def test_several_objectives_return_several_values(tmp_path: Path) -> None:
    """In the order in which they were named; nothing is pruned."""
    study_file(tmp_path)
    objective = Objective(load_spec("tiny.py").spec, device="cpu", objectives=["loss", "wall_time"])
    study = optimized(
        objective, 2, directions=["minimize", "minimize"], pruner=optuna.pruners.ThresholdPruner(upper=-1)
    )
    assert [t.values for t in study.trials] == [
        [t.user_attrs["validation_loss"], t.user_attrs["wall_time"]] for t in study.trials
    ]


def test_a_metric_as_the_objective_is_maximized(tmp_path: Path) -> None:
    """The value is the metric's best epoch in the spec's direction."""
    study_file(
        tmp_path,
        metric="return -(output - target).abs().mean()",
        spec='name="tiny", epochs=4, objective="error", direction="maximize"',
    )
    study = optimized(Objective(load_spec("tiny.py").spec, device="cpu"), 2, direction="maximize")
    for trial in study.trials:
        assert trial.value == max(trial.intermediate_values.values()) == trial.user_attrs["validation_error"]


def test_a_mistake_is_found_before_the_first_trial(tmp_path: Path) -> None:
    """A device that is not there, an objective that nothing measures, data that are no splits."""
    study_file(tmp_path)
    spec = load_spec("tiny.py").spec
    with pytest.raises(DeviceError, match="--device cuda:77"):
        Objective(spec, device="cuda:77")
    with pytest.raises(UsageError, match="speed"):
        Objective(spec, device="cpu", objectives=["speed"])
    study_file(tmp_path, data="return None")
    with pytest.raises(SpecError, match=r"tiny: data\(\) must return tuner\.Splits"):
        Objective(load_spec("tiny.py").spec, device="cpu")


def test_what_a_model_raises_is_raised_to_optuna(tmp_path: Path) -> None:
    """As from any objective: the user's `catch` decides."""
    study_file(tmp_path, model="raise ValueError('boom')")
    objective = Objective(load_spec("tiny.py").spec, device="cpu")
    study = optuna.create_study()
    with pytest.raises(ValueError, match="boom"):
        study.optimize(objective, n_trials=2)
    assert [t.state for t in study.trials] == [TrialState.FAIL]
