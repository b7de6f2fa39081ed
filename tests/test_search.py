"""The tuning loop in this process: samplers, pruners, what ends a trial, what is stored of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from tests.study_files import params_of, states, study_file, trials
from tuner.data import prepare
from tuner.run import main
from tuner.samplers import PRUNERS, SAMPLERS, grid_cells, pruner
from tuner.study_file import load_spec
from tuner.train import evaluate


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a study file makes its neighbours importable: for this test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@dataclass
class Ran:
    """A command that ran in this process."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Tune = Callable[..., Ran]


@pytest.fixture
def tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Run ``tuner.run`` on tiny.py in tmp_path."""

    def call(*arguments: str | int | Path) -> Ran:
        capsys.readouterr()
        code = main(["--study", "tiny.py", *map(str, arguments)])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "grid"])
def test_every_sampler_runs_and_repeats_itself_with_a_seed(name: str, tune: Tune, tmp_path: Path) -> None:
    """Eight trials in a new study, twice with one seed: the same trials; no warning, and no line of Optuna's."""
    study_file(tmp_path, spec='name="tiny", epochs=1')
    found = []
    for storage in ("a.db", "b.db"):
        ran = tune("--sampler", name, "--n-trials", 8, "--seed", 5, "--storage", storage)
        assert ran.code == 0, ran.err
        assert "[W " not in ran.err
        assert f"{name} sampler" in ran.err
        found.append(trials(tmp_path / storage))
    assert params_of(found[0]) == params_of(found[1])
    assert [t.values for t in found[0]] == [t.values for t in found[1]]
    assert len(set(params_of(found[0]))) == 8
    assert {t.state for t in found[0]} == {TrialState.COMPLETE}


WORSE_EACH_TIME = """
        module = nn.Linear(3, 1)
        COUNT.append(1)
        with torch.no_grad():
            module.weight.fill_(float(len(COUNT) ** 2))
        return module
"""


def worse_each_time(folder: Path, epochs: int, direction: str = "minimize") -> Path:
    objective = 'objective="score", direction="maximize"' if direction == "maximize" else ""
    return study_file(
        folder,
        head="COUNT = []",
        model=WORSE_EACH_TIME,
        space='return {"lr": trial.suggest_categorical("lr", [0.0, 0.9]), "batch_size": 7}',
        metric="return -(output - target).abs().mean()",
        spec=f'name="tiny", epochs={epochs}, {objective}',
    )


@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "minimize") for name in PRUNERS), ("median", "maximize"), ("threshold", "maximize")],
)
def test_every_pruner_prunes_bad_trials_and_only_those(name: str, direction: str, tune: Tune, tmp_path: Path) -> None:
    """Of ten trials, each worse than the one before, the first is complete and later ones are pruned, with a reason."""
    file = worse_each_time(tmp_path, epochs=8, direction=direction)
    text = file.read_text().replace('metrics={"error": metric}', 'metrics={"score": metric}')
    file.write_text(text)
    # The patient pruner waits until a trial gets worse, as it does with a rate that is too high; the others do not.
    rates = [0.0] * 5 + [0.9 if name == "patient" else 0.0] * 5
    (tmp_path / "points.json").write_text(json.dumps([{"lr": lr} for lr in rates]))
    threshold = ["--threshold", "-40" if direction == "maximize" else "1000"] if name == "threshold" else []
    ran = tune("--pruner", name, "--n-trials", 10, "--enqueue", "points.json", "--lanes", 1, *threshold)
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    assert found[0].state == TrialState.COMPLETE
    pruned = [t for t in found if t.state == TrialState.PRUNED]
    if name == "none":
        assert pruned == []
        return
    assert pruned
    for trial in pruned:
        epochs = trial.user_attrs["epochs"]
        assert trial.user_attrs["reason"] == f"pruned at epoch {epochs - 1}"
        assert epochs < 8
        assert sorted(trial.intermediate_values) == list(range(epochs))
        assert trial.value == trial.intermediate_values[epochs - 1]


def test_a_pruner_that_prunes_everything_ends_and_says_that_none_is_complete(tune: Tune, tmp_path: Path) -> None:
    """Pruned trials count: `--total-trials` ends, with exit code 3 and the reason."""
    study_file(tmp_path)
    ran = tune("--pruner", "threshold", "--threshold", "-1", "--total-trials", 5)
    assert ran.code == 3
    assert states(tmp_path / "tuner.db") == ["PRUNED"] * 5
    assert ran.err.splitlines()[-1].startswith("error: no trial of the study is complete")


def test_a_pruner_of_another_library_would_not_be_found() -> None:
    """Names are checked where they are used as well."""
    with pytest.raises(Exception, match="--pruner best: wanted one of none, median"):
        pruner("best", 10, None, False)


GRID = """
        return {
            "lr": trial.suggest_float("lr", 0.1, 0.3, step=0.1),
            "batch_size": trial.suggest_categorical("batch_size", [1, 2, 4]),
        }
"""


def test_a_grid_runs_through_its_cells_and_ends(tune: Tune, tmp_path: Path) -> None:
    """Each cell once, without a number of trials; a second call finds nothing left, and adds nothing."""
    study_file(tmp_path, space=GRID, spec='name="tiny", epochs=1')
    ran = tune("--sampler", "grid", "--pruner", "none")
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    assert [t.state for t in found] == [TrialState.COMPLETE] * 9
    cells = grid_cells(found[0].distributions)
    assert len(cells) == 9
    assert sorted(params_of(found)) == sorted(tuple(sorted(cell.items())) for cell in cells)
    assert "out of range" not in ran.err
    again = tune("--sampler", "grid", "--pruner", "none")
    assert again.code == 0
    assert len(trials(tmp_path / "tuner.db")) == 9


def test_a_grid_may_be_run_in_portions(tune: Tune, tmp_path: Path) -> None:
    """`--n-trials 4` twice, then the rest: each cell once."""
    study_file(tmp_path, space=GRID, spec='name="tiny", epochs=1')
    for arguments in (["--n-trials", 4], ["--n-trials", 4], []):
        assert tune("--sampler", "grid", "--pruner", "none", *arguments).code == 0
    found = trials(tmp_path / "tuner.db")
    assert [t.state for t in found] == [TrialState.COMPLETE] * 9
    assert len(set(params_of(found))) == 9


def test_a_grid_ends_also_when_more_trials_were_asked_for_than_it_has_cells(tune: Tune, tmp_path: Path) -> None:
    """`--total-trials` above the number of cells does not wait for cells that never come."""
    study_file(tmp_path, space=GRID, spec='name="tiny", epochs=1')
    assert tune("--sampler", "grid", "--pruner", "none", "--total-trials", 20).code == 0
    assert states(tmp_path / "tuner.db") == ["COMPLETE"] * 9


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ('return {"lr": trial.suggest_float("lr", 0.1, 0.3), "batch_size": 4}', "lr has no steps"),
        ('return {"lr": 1 / trial.suggest_int("i", 1, 64, log=True), "batch_size": 4}', "i has no steps"),
        (
            'return {"lr": trial.suggest_float("lr", 0, 1, step=1e-6), "batch_size": 4}',
            "1,000,001 cells, at most 100,000",
        ),
    ],
)
def test_a_space_that_is_no_grid_is_one_line_and_leaves_nothing(
    space: str, words: str, tune: Tune, tmp_path: Path
) -> None:
    """Found before the storage is made."""
    study_file(tmp_path, space=space)
    before = sorted(tmp_path.rglob("*"))
    ran = tune("--sampler", "grid")
    assert ran.code == 2
    assert ran.err.startswith("error: --sampler grid: ")
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == before


def test_conditional_parameters_are_sampled_where_they_are_there(tune: Tune, tmp_path: Path) -> None:
    """A trial has the parameters of its branch, and trains with them."""
    study_file(
        tmp_path,
        space="""
            depth = trial.suggest_int("depth", 1, 3)
            widths = [trial.suggest_int(f"width_{i}", 2, 5) for i in range(depth)]
            return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "batch_size": 4, "widths": widths}
        """,
        model="""
            sizes = [3, *hyperparameters["widths"], 1]
            return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))
        """,
        spec='name="tiny", epochs=1',
    )
    ran = tune("--n-trials", 14, "--seed", 1)
    assert ran.code == 0, ran.err
    assert "[W " not in ran.err
    found = trials(tmp_path / "tuner.db")
    assert {t.params["depth"] for t in found} == {1, 2, 3}
    for trial in found:
        assert {name for name in trial.params if name.startswith("width")} == {
            f"width_{i}" for i in range(trial.params["depth"])
        }


ATTRIBUTES = set(
    "wall_time device_seconds build_seconds train_seconds validate_seconds wait_seconds samples_per_second epochs"
    " peak_memory_mb device lanes worker seed best_epoch train_loss validation_loss validation_error".split()
)


def test_a_trials_value_is_its_best_epoch_and_everything_is_stored(tune: Tune, tmp_path: Path) -> None:
    """Learning curve, best epoch, metrics of that epoch, times, device, lanes, worker and seed."""
    study_file(
        tmp_path,
        # A rate above what is stable: the loss grows from epoch to epoch, the first epoch is the best.
        space='return {"lr": 0.9 + 0.0 * trial.suggest_float("x", 0, 1), "batch_size": 7}',
        spec='name="tiny", epochs=4, seed=3',
    )
    assert tune("--n-trials", 2, "--pruner", "none").code == 0
    for trial in trials(tmp_path / "tuner.db"):
        curve = trial.intermediate_values
        assert sorted(curve) == [0, 1, 2, 3]
        best = min(curve, key=lambda epoch: curve[epoch])
        assert trial.value == curve[best]
        attributes = trial.user_attrs
        assert set(attributes) - {"weights"} == ATTRIBUTES
        assert attributes["best_epoch"] == best
        assert attributes["validation_loss"] == trial.value
        assert (attributes["epochs"], attributes["seed"], attributes["lanes"]) == (4, 3, 1)
        assert attributes["device"].startswith("cpu ")
        parts = sum(attributes[f"{part}_seconds"] for part in ("build", "train", "validate", "wait"))
        assert parts == pytest.approx(attributes["wall_time"], rel=0.02)
        assert all(attributes[f"{part}_seconds"] > 0 for part in ("build", "train", "validate", "wait", "device"))
        assert attributes["samples_per_second"] == pytest.approx(28 / attributes["train_seconds"])


def test_a_metric_may_be_what_is_optimized(tune: Tune, tmp_path: Path) -> None:
    """Its best epoch is the trial's value, in its direction; the best trial has the largest."""
    file = study_file(
        tmp_path,
        metric="return -(output - target).abs().mean()",
        spec='name="tiny", epochs=3, objective="error", direction="maximize"',
    )
    assert file.exists()
    ran = tune("--n-trials", 4, "--pruner", "none", "--json", "--seed", 0)
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    for trial in found:
        assert trial.value == max(trial.intermediate_values.values())
        assert trial.value == trial.user_attrs["validation_error"] < 0
    assert ran.document["best"]["values"] == [max(t.value for t in found if t.value is not None)]
    assert ran.document["objectives"] == ["validation error"]


def test_seconds_go_to_the_part_that_spent_them(tune: Tune, tmp_path: Path) -> None:
    """A slow constructor shows in `build_seconds`, a slow training step in `train_seconds`, and parts add up."""
    study_file(
        tmp_path,
        model="""
            class Slow(nn.Linear):
                def forward(self, x):
                    time.sleep(0.03 if self.training else 0.0)
                    return super().forward(x)
            time.sleep(0.3)
            return Slow(3, 1)
        """,
        space='return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "batch_size": 4}',
    )
    assert tune("--n-trials", 2).code == 0
    for trial in trials(tmp_path / "tuner.db"):
        a = trial.user_attrs
        assert a["build_seconds"] >= 0.3
        assert a["train_seconds"] >= 0.18  # 3 epochs of 2 steps
        assert a["wait_seconds"] + a["validate_seconds"] <= a["wall_time"] - 0.48
        total = a["build_seconds"] + a["train_seconds"] + a["validate_seconds"] + a["wait_seconds"]
        assert total == pytest.approx(a["wall_time"], rel=0.02)
        assert a["device_seconds"] == pytest.approx(a["train_seconds"] + a["validate_seconds"])


def test_a_slow_sampler_or_space_is_waiting(tune: Tune, tmp_path: Path) -> None:
    """What is neither building, training nor validating is `wait_seconds`."""
    study_file(
        tmp_path,
        space="""
            time.sleep(0.02)
            return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "batch_size": 4}
        """,
    )
    assert tune("--n-trials", 1).code == 0
    (trial,) = trials(tmp_path / "tuner.db")
    assert trial.user_attrs["wait_seconds"] >= 0.02


DIVERGES = """
        return {"lr": trial.suggest_categorical("lr", [1e6, 0.1]), "batch_size": 4}
"""


def test_a_diverged_trial_is_pruned_with_its_reason_and_the_run_goes_on(tune: Tune, tmp_path: Path) -> None:
    """`lr=1e6`: "loss is nan (or inf) at epoch k"; never the best, and known to the sampler."""
    study_file(tmp_path, space=DIVERGES, spec='name="tiny", epochs=12')
    (tmp_path / "points.json").write_text('[{"lr": 1e6}, {"lr": 0.1}, {"lr": 1e6}]')
    ran = tune("--enqueue", "points.json", "--n-trials", 3, "--json")
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    assert [t.state.name for t in found] == ["PRUNED", "COMPLETE", "PRUNED"]
    for trial in (found[0], found[2]):
        epoch = trial.user_attrs["epochs"] - 1
        assert trial.user_attrs["reason"].endswith((f"loss is nan at epoch {epoch}", f"loss is inf at epoch {epoch}"))
        assert all(torch.isfinite(torch.tensor(value)) for value in trial.intermediate_values.values())
    assert ran.document["best"]["number"] == 1
    assert "loss is " in ran.err


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "nsgaii"])
def test_every_sampler_lives_with_diverged_trials(sampler: str, tune: Tune, tmp_path: Path) -> None:
    """Trials that ended without a value do not stop the sampler from proposing the next."""
    study_file(
        tmp_path,
        space='return {"lr": trial.suggest_float("lr", 1e-3, 1e12, log=True), "batch_size": 2}',
        spec='name="tiny", epochs=4',
    )
    ran = tune("--sampler", sampler, "--n-trials", 14, "--seed", 2)
    assert ran.code == 0, ran.err
    assert len(states(tmp_path / "tuner.db")) == 14
    assert {"PRUNED", "COMPLETE"} <= set(states(tmp_path / "tuner.db"))


RAISES = {
    "model": {"model": "if hyperparameters['fail']: raise ValueError('boom')\nreturn nn.Linear(3, 1)"},
    "forward": {
        "model": """
            class Picky(nn.Linear):
                def forward(self, x):
                    if hyperparameters["fail"]:
                        raise ValueError("boom")
                    return super().forward(x)
            return Picky(3, 1)
        """
    },
    "loss": {
        "head": "FAIL = [False]",
        "model": "FAIL[0] = hyperparameters['fail']; return nn.Linear(3, 1)",
        "loss": "if FAIL[0]: raise ValueError('boom')\nreturn nn.functional.mse_loss(output, target)",
    },
    "metric": {
        "head": "FAIL = [False]",
        "model": "FAIL[0] = hyperparameters['fail']; return nn.Linear(3, 1)",
        "metric": "if FAIL[0]: raise ValueError('boom')\nreturn output.mean()",
    },
    "space": {
        "head": "ASKED = []",
        "space": """
            ASKED.append(1)
            lr, fail = trial.suggest_float("lr", 0.01, 0.1), trial.suggest_categorical("fail", [False, True])
            if fail and len(ASKED) > 64:
                raise ValueError("boom")
            return {"lr": lr, "batch_size": 4}
        """,
    },
}
CAN_FAIL = """
        fail = trial.suggest_categorical("fail", [False, True])
        return {"lr": trial.suggest_float("lr", 0.01, 0.1), "batch_size": 4, "fail": fail}
"""


@pytest.mark.parametrize("where", RAISES)
def test_a_trial_that_raises_fails_with_its_reason_and_the_run_goes_on(where: str, tune: Tune, tmp_path: Path) -> None:
    """In model(), forward, loss, a metric or space(): type, message, file and line are stored and shown."""
    file = study_file(tmp_path, **{"space": CAN_FAIL, **RAISES[where]})
    (tmp_path / "points.json").write_text(json.dumps([{"fail": fail} for fail in (True, False, True, False)]))
    ran = tune("--enqueue", "points.json", "--n-trials", 4)
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    assert [t.state.name for t in found] == ["FAIL", "COMPLETE", "FAIL", "COMPLETE"]
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "raise ValueError" in text)
    line += "if FAIL[0]: raise" not in file.read_text() and where == "metric"
    for trial in (found[0], found[2]):
        assert trial.user_attrs["reason"] == f"ValueError: boom (tiny.py:{line})"
        assert trial.user_attrs["wall_time"] > 0
    assert ran.err.count(f"ValueError: boom (tiny.py:{line})") == 2
    assert "Traceback" not in ran.err
    assert {"fail": True} in [{"fail": t.params.get("fail")} for t in found if t.state == TrialState.FAIL]


FAILS_AFTER_THE_PROBE = {
    "head": "BUILT = []",
    "model": "BUILT.append(1)\nif len(BUILT) > 1: raise RuntimeError('no more of it')\nreturn nn.Linear(3, 1)",
}


def test_ten_failures_in_a_row_stop_the_run_with_their_cause(tune: Tune, tmp_path: Path) -> None:
    """Exit code 1, one line, ten failed trials and no more."""
    study_file(tmp_path, **FAILS_AFTER_THE_PROBE)
    ran = tune("--n-trials", 40, "--lanes", 1, "--workers", 1)
    assert ran.code == 1
    assert states(tmp_path / "tuner.db") == ["FAIL"] * 10
    last = ran.err.splitlines()[-1]
    assert last.startswith("error: 10 trials failed in a row, the last one with: RuntimeError: no more of it (tiny.py:")


def test_a_run_without_a_complete_trial_says_so(tune: Tune, tmp_path: Path) -> None:
    """Exit code 3."""
    study_file(tmp_path, **FAILS_AFTER_THE_PROBE)
    ran = tune("--n-trials", 3, "--workers", 1)
    assert ran.code == 3
    assert states(tmp_path / "tuner.db") == ["FAIL"] * 3
    assert "no trial of the study is complete" in ran.err.splitlines()[-1]


def test_a_trial_that_somebody_else_ended_is_dropped_and_the_run_goes_on(tune: Tune, tmp_path: Path) -> None:
    """One line about it, its end stays as it is, the other trials are trained, exit code 0."""
    study_file(
        tmp_path,
        head="import optuna, sqlite3\nBUILT = []",
        # The second trial's training is interrupted by another program that fails the trial.
        loss="""
            BUILT.append(1)
            if os.path.exists("tuner.db") and not os.path.exists("done"):
                with sqlite3.connect("tuner.db", timeout=30) as other:
                    running = other.execute("SELECT trial_id, number FROM trials WHERE state = 'RUNNING'").fetchall()
                    if running and running[0][1] == 1:
                        other.execute("UPDATE trials SET state = 'FAIL' WHERE trial_id = ?", running[0][:1])
                        open("done", "w").close()
                other.close()
            return nn.functional.mse_loss(output, target)
        """,
    )
    for pruner_name, storage in (("median", "tuner.db"), ("none", "tuner.db")):
        (tmp_path / "done").unlink(missing_ok=True)
        (tmp_path / storage).unlink(missing_ok=True)
        ran = tune("--n-trials", 3, "--pruner", pruner_name)
        assert ran.code == 0, ran.err
        assert states(tmp_path / storage) == ["COMPLETE", "FAIL", "COMPLETE"]
        assert ran.err.count("trial 1 was ended by another process (fail); it is dropped here") == 1


def test_the_best_trials_weights_are_kept_and_give_its_value(tune: Tune, tmp_path: Path) -> None:
    """One file, named in trial and result; loaded safely and evaluated it gives the stored loss; no other is left."""
    study_file(tmp_path)
    ran = tune("--n-trials", 8, "--json", "--seed", 3)
    assert ran.code == 0, ran.err
    best = ran.document["best"]
    file = Path(ran.document["weights"])
    assert file == tmp_path / "tuner-weights" / "tiny" / f"trial-{best['number']}.pt"
    assert list((tmp_path / "tuner-weights").rglob("*.*")) == [file]
    content = torch.load(file, weights_only=True)
    assert content["trial"] == best["number"]
    assert content["hyperparameters"] == best["params"]
    loaded = load_spec("tiny.py")
    cpu = torch.device("cpu")
    data = prepare(loaded.spec.data(), cpu, "here")
    module = loaded.spec.model(content["hyperparameters"])
    module.load_state_dict(content["weights"])
    found = evaluate(module, loaded.spec.loss, loaded.spec.task(data, cpu), data.validation)
    assert found["loss"] == best["values"][0]
    again = tune("--n-trials", 0, "--json").document
    assert again["weights"] == str(file)


def test_weights_are_kept_where_they_are_asked_for(tune: Tune, tmp_path: Path) -> None:
    """`--weights DIR`, by study; a study's name is no way out of it."""
    study_file(tmp_path)
    ran = tune("--n-trials", 1, "--json", "--weights", "kept", "--study-name", "../up")
    assert ran.code == 0, ran.err
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["..%2Fup"]
    for name in ("..", ".", "x" * 300, "ü" * 200):
        ran = tune("--n-trials", 1, "--json", "--weights", "kept", "--study-name", name)
        assert ran.code == 0, ran.err
        assert (tmp_path / "kept") == Path(ran.document["weights"]).parent.parent
    assert len(list((tmp_path / "kept").iterdir())) == 5


def test_weights_that_cannot_be_written_are_said_before_the_search(tune: Tune, tmp_path: Path) -> None:
    """A file in the place of the directory: one line, exit code 2, nothing left behind."""
    study_file(tmp_path)
    (tmp_path / "kept").write_text("mine")
    ran = tune("--n-trials", 1, "--weights", "kept")
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert "kept" in ran.err
    assert not (tmp_path / "tuner.db").exists()


def test_two_objectives_are_not_pruned_and_have_a_front(tune: Tune, tmp_path: Path) -> None:
    """`--objectives loss wall_time`: says that it prunes nothing, and prints the Pareto front."""
    study_file(tmp_path)
    ran = tune("--objectives", "loss", "wall_time", "--n-trials", 5)
    assert ran.code == 0, ran.err
    assert "several objectives: no trial is pruned" in ran.err
    found = trials(tmp_path / "tuner.db")
    assert [t.state for t in found] == [TrialState.COMPLETE] * 5
    for trial in found:
        assert trial.values == [trial.user_attrs["validation_loss"], trial.user_attrs["wall_time"]]
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{tmp_path / 'tuner.db'}")
    front = ", ".join(str(t.number) for t in sorted(study.best_trials, key=lambda t: t.number))
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    assert f"Pareto front of validation loss and wall_time: trials {front}\n" in ran.out


def test_the_time_alone_may_be_the_objective(tune: Tune, tmp_path: Path) -> None:
    """Its values are seconds, and those of its best trial are the smallest; its weights are kept as well."""
    study_file(tmp_path)
    ran = tune("--objectives", "wall_time", "--n-trials", 6, "--json", "--pruner", "none")
    assert ran.code == 0, ran.err
    found = trials(tmp_path / "tuner.db")
    assert [t.values for t in found] == [[t.user_attrs["wall_time"]] for t in found]
    assert ran.document["best"]["values"] == [min(t.value for t in found if t.value is not None)]
    weights = ran.document["weights"]
    assert weights is None or Path(weights).name == f"trial-{ran.document['best']['number']}.pt"


def test_enqueued_points_are_the_first_trials(tune: Tune, tmp_path: Path) -> None:
    """In their order, with their values; what a point leaves out is sampled."""
    study_file(tmp_path)
    (tmp_path / "points.json").write_text('[{"lr": 0.25, "batch_size": 2}, {"batch_size": 4}]')
    assert tune("--enqueue", "points.json", "--n-trials", 3).code == 0
    found = trials(tmp_path / "tuner.db")
    assert found[0].params == {"lr": 0.25, "batch_size": 2}
    assert found[1].params["batch_size"] == 4


def test_json_is_one_strict_document_whatever_a_study_file_prints(tune: Tune, tmp_path: Path) -> None:
    """A study file's prints go to stderr; not even NaN disturbs the document."""
    study_file(
        tmp_path,
        head='print("imported")',
        model='print("built"); return nn.Linear(3, 1)',
        loss='print("lost"); return nn.functional.mse_loss(output, target)',
    )
    ran = tune("--n-trials", 2, "--json")
    assert ran.code == 0

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    document = json.loads(ran.out, parse_constant=refuse)
    assert {"study", "storage", "device", "added", "states", "best", "parts", "commands", "weights"} <= set(document)
    assert document["added"] == 2
    assert sum(document["parts"].values()) <= document["seconds"] * 1.02
    for word in ("imported", "built", "lost"):
        assert word in ran.err


def test_the_seconds_of_a_run_are_all_accounted_for(tune: Tune, tmp_path: Path) -> None:
    """With one worker the parts add up to the run's time within 2 %."""
    study_file(tmp_path)
    document = tune("--n-trials", 6, "--json").document
    assert sum(document["parts"].values()) == pytest.approx(document["seconds"], rel=0.02)


def test_no_trial_starts_after_the_timeout(tune: Tune, tmp_path: Path) -> None:
    """`--timeout` ends the run with the trial that is in training; that one is kept."""
    study_file(tmp_path, model="time.sleep(0.25)\nreturn nn.Linear(3, 1)")
    ran = tune("--timeout", 0.6, "--lanes", 1)
    assert ran.code == 0, ran.err
    assert 1 <= len(states(tmp_path / "tuner.db")) <= 3
    assert set(states(tmp_path / "tuner.db")) == {"COMPLETE"}
    assert "none starts after 0.60 s" in ran.err


def test_n_trials_adds_and_total_trials_fills_up(tune: Tune, tmp_path: Path) -> None:
    """Three and three more are six; up to eight are two more; eight again are none, which is said, with exit code 0."""
    study_file(tmp_path, spec='name="tiny", epochs=1')
    for arguments, count in ((["--n-trials", 3], 3), (["--n-trials", 3], 6), (["--total-trials", 8], 8)):
        assert tune(*arguments).code == 0
        assert states(tmp_path / "tuner.db") == ["COMPLETE"] * count
    ran = tune("--total-trials", 8)
    assert ran.code == 0
    assert "nothing left to do: the study holds 8 complete or pruned trials" in ran.out
    assert "resumed, 8 complete" in ran.err.splitlines()[0]
    assert len(states(tmp_path / "tuner.db")) == 8


def test_failed_trials_do_not_count_towards_the_total(tune: Tune, tmp_path: Path) -> None:
    """`--total-trials 4` with two failures makes six trials."""
    study_file(tmp_path, space=CAN_FAIL, **RAISES["model"])
    (tmp_path / "points.json").write_text(json.dumps([{"fail": n < 2} for n in range(6)]))
    assert tune("--enqueue", "points.json", "--total-trials", 4).code == 0
    assert states(tmp_path / "tuner.db") == ["FAIL"] * 2 + ["COMPLETE"] * 4


def test_a_seed_gives_other_samples_when_the_study_is_resumed(tune: Tune, tmp_path: Path) -> None:
    """25 + 25 trials with one seed are 50 different samples; a new study with it repeats the first 25."""
    study_file(tmp_path, spec='name="tiny", epochs=1')
    for _ in range(2):
        assert tune("--n-trials", 25, "--seed", 7, "--sampler", "random", "--pruner", "none").code == 0
    found = trials(tmp_path / "tuner.db")
    assert len(found) == len(set(params_of(found))) == 50


def test_the_first_lines_say_what_happens_where(tune: Tune, tmp_path: Path) -> None:
    """Study, absolute storage, new or resumed with counts and best, device, threads and why, search, notes."""
    study_file(tmp_path)
    first = tune("--n-trials", 2).err.splitlines()
    assert first[0] == f"study    tiny in sqlite:///{tmp_path / 'tuner.db'}: new"
    assert first[1].startswith("device   cpu ")
    assert "1 worker, 1 lane, 1 thread" in first[1]
    assert first[2] == "search   tpe sampler, median pruner, 2 trials to add"
    again = tune("--n-trials", 1, "--threads", 1, "--workers", 1, "--lanes", 1).err.splitlines()
    assert "resumed, 2 complete, 0 pruned, 0 failed; best validation loss" in again[0]
    assert "1 thread (as asked for)" in again[1]
    assert again[2].endswith("1 trial to add")


def test_the_resume_command_resumes_this_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, from another directory: also with odd characters in its path, another name, other objectives."""
    import shlex

    folder = tmp_path / "a {b} %20 ?c"
    folder.mkdir()
    file = study_file(folder)
    storage = folder / "my study.db"
    cases: list[list[str]] = [[], ["--study-name", "other name"], ["--objectives", "error:minimize", "wall_time"]]
    for number, more in enumerate(cases):
        where = ["--storage", str(storage.with_name(f"my study {number}.db"))]
        assert main(["--study", str(file), "--n-trials", "1", "--json", *where, *more]) == 0
        commands = json.loads(capsys.readouterr().out)["commands"]
        words = shlex.split(commands["resume"])
        assert words[1:3] == ["-m", "tuner.run"]
        assert main([*words[3:], "--n-trials", "1"]) == 0, capsys.readouterr().err
        assert "resumed, 1 complete" in capsys.readouterr().err
        name = "other name" if number == 1 else "tiny"
        assert len(trials(storage.with_name(f"my study {number}.db"), name)) == 2
        for other in ("browse", "report"):
            assert where[1] in shlex.split(commands[other])


def test_the_studies_that_come_along_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--list-studies` prints each with what it tunes, and starts nothing."""
    assert main(["--list-studies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "digits_mlp" and "Tune a multilayer perceptron" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_the_default_study_is_tuned_the_same_way_twice(tmp_path: Path) -> None:
    """`--seed`, a new study, one worker, one thread: hyperparameters, learning curves and values are bit-equal."""
    for name in ("a", "b"):
        assert main(["--n-trials", "3", "--seed", "3", "--threads", "1", "--storage", f"{name}.db"]) == 0
    first, second = (trials(tmp_path / f"{name}.db", "digits-mlp") for name in ("a", "b"))
    assert len(first) == 3
    assert params_of(first) == params_of(second)
    assert [t.intermediate_values for t in first] == [t.intermediate_values for t in second]
    assert [t.values for t in first] == [t.values for t in second]
