"""What a study file may say, how it is found, and what is said of its mistakes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor, nn

from tests.study_files import study_file
from tuner import Splits, StudySpec
from tuner.clock import Stopwatch
from tuner.data import prepare
from tuner.errors import SpecError
from tuner.spec import LoadedSpec, explore, one_line, quiet_optuna, required_arguments, sgd
from tuner.study_file import list_specs, load_spec
from tuner.train import SGD, Lone


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a study file makes its neighbours importable: for this test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("source", ["digits_mlp", "digits-mlp", "digits_cnn", "digits_search", "diabetes_mlp"])
def test_a_study_of_ours_is_found_by_its_name(source: str) -> None:
    """With an underscore, as its file is called, or with a dash, as its study is."""
    loaded = load_spec(source)
    assert loaded.spec.name == source.replace("_", "-")
    assert Path(loaded.source).is_absolute()
    assert load_spec(loaded.source).spec.name == loaded.spec.name
    assert loaded.description.startswith("Tune a")


def test_studies_are_listed_with_the_first_line_of_their_docstring() -> None:
    """`--list-studies` has each file of ours and what it tunes."""
    listed = dict(list_specs())
    assert set(listed) >= {"digits_mlp", "digits_cnn", "diabetes_mlp"}
    assert all(line.startswith("Tune ") for line in listed.values())


def test_a_file_anywhere_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative or absolute path, with a directory or without; the source loads it from any other directory."""
    folder = tmp_path / "some where"
    folder.mkdir()
    study_file(folder, spec='name="far", epochs=2')
    for source in (str(folder / "tiny.py"), "some where/tiny.py", "./some where/../some where/tiny.py"):
        loaded = load_spec(source)
        assert loaded.spec.name == "far"
        assert loaded.source == str(folder / "tiny.py")
        assert loaded.description == "A tiny study for tests."
    monkeypatch.chdir(folder)
    assert load_spec("tiny.py").spec.epochs == 2


def test_a_study_file_imports_its_neighbours(tmp_path: Path) -> None:
    """As when it is run as a script."""
    (tmp_path / "neighbour_of_a_study.py").write_text("EPOCHS = 7\n")
    study_file(tmp_path, head="from neighbour_of_a_study import EPOCHS", spec='name="tiny", epochs=EPOCHS')
    assert load_spec("tiny.py").spec.epochs == 7


def test_a_spec_is_found_by_module_and_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``package.module:attribute``, from the working directory; the attribute is ``spec`` if none is named."""
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    study_file(package, "mine.py")
    with (package / "mine.py").open("a") as file:
        file.write('import dataclasses\nother = dataclasses.replace(spec, name="other")\n')
    assert load_spec("a_package_of_mine.mine:other").spec.name == "other"
    assert load_spec("a_package_of_mine.mine:").spec.name == "tiny"
    with pytest.raises(SpecError, match=r"^a_package_of_mine\.mine:absent: .*'absent'.*there is none$"):
        load_spec("a_package_of_mine.mine:absent")
    with pytest.raises(SpecError, match=r"^--study a_package_of_mine\.missing: does not import: ModuleNotFoundError"):
        load_spec("a_package_of_mine.missing:spec")


def test_a_description_of_the_spec_comes_before_the_files_docstring(tmp_path: Path) -> None:
    """For the dashboard."""
    study_file(tmp_path, spec='name="tiny", description="What I say."')
    assert load_spec("tiny.py").description == "What I say."


BROKEN = {
    "syntax": ("def :\n", ["does not import: line 1", "SyntaxError"]),
    "raises": ("x = 1\n\nraise ValueError('no data here')\n", ["does not import: line 3", "ValueError: no data here"]),
    "exits": ("import sys\nsys.exit('done')\n", ["does not import: line 2", "SystemExit"]),
    "missing module": ("import no_such_module_of_mine\n", ["line 1", "ModuleNotFoundError", "no_such_module_of_mine"]),
    "no spec": ("x = 1\n", ["wanted a variable 'spec'", "there is none"]),
    "spec of another type": ("spec = {'name': 'x'}\n", ["'spec' must be a tuner.StudySpec", "found dict"]),
    "several lines": ("raise ValueError('one\\ntwo')\n", ["ValueError: one"]),
    "nul": ("x = 1\0\n", ["does not import"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_study_is_one_line_that_names_it(kind: str, tmp_path: Path) -> None:
    """File, line, what was wanted and what was found."""
    text, words = BROKEN[kind]
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("source", ["no_such_study", "absent.py", "/no/where/absent.py", "folder/", "", "."])
def test_a_study_that_is_not_there_is_one_line(source: str) -> None:
    """It repeats what was asked for; for a name it lists those that there are."""
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    message = str(caught.value)
    assert message.startswith(f"--study {source}: ")
    assert ("there is no such file" in message) or ("digits_mlp" in message)


WRONG_SPECS = {
    'name=""': "name must be a short text",
    "name=7": "name must be a short text",
    'name="x" * 501': "name must be a short text",
    'name="a\\0b"': "NUL",
    'name="tiny", epochs=0': "epochs must be a positive integer; found 0",
    'name="tiny", epochs=2.5': "epochs must be a positive integer; found 2.5",
    'name="tiny", epochs=True': "epochs must be a positive integer; found True",
    'name="tiny", seed=-1': "seed must be an integer from 0; found -1",
    'name="tiny", objective="accuracy"': "objective must be one of loss, error; found 'accuracy'",
    'name="tiny", direction="up"': "direction must be minimize or maximize; found 'up'",
    'name="tiny", epoch=3': "unexpected keyword argument 'epoch'",
}


@pytest.mark.parametrize("arguments", WRONG_SPECS)
def test_a_wrong_argument_of_a_spec_is_one_line_that_names_the_file(arguments: str, tmp_path: Path) -> None:
    """What was wanted and what was found, and in which line of the file."""
    path = study_file(tmp_path, spec=arguments)
    with pytest.raises(SpecError) as caught:
        load_spec("tiny.py")
    message = str(caught.value)
    last_line = len(path.read_text().rstrip().splitlines())
    assert str(path) in message
    assert f"line {last_line}" in message
    assert WRONG_SPECS[arguments] in message
    assert "\n" not in message


def no_data() -> Splits:
    raise AssertionError("the data were loaded")


def make_spec(**changed: Any) -> StudySpec:
    parts: dict[str, Any] = {
        "name": "made",
        "data": no_data,
        "space": lambda trial: {"lr": 0.1, "batch_size": 4},
        "model": lambda hyperparameters: nn.Linear(3, 1),
        "loss": nn.functional.mse_loss,
    }
    return StudySpec(**{**parts, **changed})


@pytest.mark.parametrize("name", ["data", "space", "model", "loss"])
def test_a_part_that_is_no_function_is_refused(name: str) -> None:
    """Data, space, model and loss are called."""
    with pytest.raises(SpecError, match=f"{name} must be a function; found 3"):
        make_spec(**{name: 3})


@pytest.mark.parametrize(
    ("metrics", "words"),
    [([len], "metrics must be a dictionary"), ({"m": 3}, "'m' must be a function"), ({"loss": len}, "'loss'")],
)
def test_wrong_metrics_are_refused(metrics: Any, words: str) -> None:
    """Metrics are functions by name, and none may be called like the loss."""
    with pytest.raises(SpecError, match=words):
        make_spec(metrics=metrics)


def explored(space: Any) -> Any:
    return explore(LoadedSpec(make_spec(space=space), "here.py", "here.py", ""))


def test_exploring_a_space_finds_its_conditional_parameters() -> None:
    """A parameter that only some samples have is found, and the sample that has it is kept."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        kind = trial.suggest_categorical("kind", ["a", "b", "c"])
        depth = trial.suggest_int("depth", 1, 4)
        rest = {"only_c": trial.suggest_float("only_c", 0.0, 1.0)} if kind == "c" else {}
        widths = [trial.suggest_int(f"width_{i}", 4, 8) for i in range(depth)]
        return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True), "batch_size": 4, "widths": widths, **rest}

    found = explored(space)
    assert set(found.distributions) == {"kind", "depth", "only_c", "lr", *(f"width_{i}" for i in range(4))}
    assert found.distributions["lr"] == optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)
    assert any("only_c" in sample for sample in found.samples)
    assert {len(sample["widths"]) for sample in found.samples} == {1, 2, 3, 4}
    assert explored(space) == found


def fails(trial: optuna.Trial) -> dict[str, Any]:
    raise KeyError("no such choice")


WRONG_SPACES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda trial: None, "space() must return a dictionary; found NoneType"),
    "a list": (lambda trial: ["lr"], "space() must return a dictionary; found list"),
    "no lr": (lambda trial: {"batch_size": 4}, "space() must return 'lr'; found 'batch_size'"),
    "no batch size": (lambda trial: {"lr": 0.1}, "space() must return 'batch_size'; found 'lr'"),
    "empty": (lambda trial: {}, "space() must return 'lr'; found nothing"),
    "raises": (fails, "space() raised KeyError: 'no such choice' (test_spec.py:"),
    "batch size 0": (lambda trial: {"lr": 0.1, "batch_size": 0}, "batch_size must be a positive integer; found 0"),
    "batch size 1.5": (lambda trial: {"lr": 0.1, "batch_size": 1.5}, "batch_size must be a positive integer"),
    "negative lr": (lambda trial: {"lr": -0.1, "batch_size": 4}, "lr must be a number from 0; found -0.1"),
    "nan lr": (lambda trial: {"lr": float("nan"), "batch_size": 4}, "lr must be a number from 0; found nan"),
    "lr as text": (lambda trial: {"lr": "0.1", "batch_size": 4}, "lr must be a number from 0; found '0.1'"),
    "momentum": (lambda trial: {"lr": 1, "batch_size": 4, "momentum": -1}, "momentum must be a number from 0"),
    "schedule": (
        lambda trial: {"lr": 1, "batch_size": 4, "schedule": "linear"},
        "schedule must be one of constant, cosine, step, one-cycle; found 'linear'",
    ),
    "wrong range": (
        lambda trial: {"lr": trial.suggest_float("lr", 2, 1), "batch_size": 4},
        "space() raised ValueError",
    ),
}


@pytest.mark.parametrize("kind", WRONG_SPACES)
def test_a_wrong_space_is_one_line_that_names_the_file(kind: str) -> None:
    """What `space` should have returned, and what it did return."""
    space, words = WRONG_SPACES[kind]
    with pytest.raises(SpecError) as caught:
        explored(space)
    assert str(caught.value).startswith("here.py: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_optimizers_part_of_the_hyperparameters_is_taken_and_no_other() -> None:
    """Its names are those of torch.optim.SGD and of the schedule; the others are the model's."""
    found = sgd({"lr": 0.1, "batch_size": 4, "momentum": 0.9, "nesterov": True, "schedule": "cosine", "width": 64})
    assert found == SGD(0.1, 4, momentum=0.9, nesterov=True, schedule="cosine")
    # torch.optim.SGD refuses Nesterov without momentum; a search space may sample the pair.
    assert sgd({"lr": 0.1, "batch_size": 4, "momentum": 0.0, "nesterov": True}) == SGD(0.1, 4)


def test_nesterov_with_dampening_is_refused_as_pytorch_does() -> None:
    """`torch.optim.SGD` wants momentum and no dampening for Nesterov; so does the spec."""
    with pytest.raises(ValueError, match="Nesterov"):
        torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9, nesterov=True, dampening=0.1)
    with pytest.raises(SpecError, match="nesterov"):
        sgd({"lr": 0.1, "batch_size": 4, "momentum": 0.9, "nesterov": True, "dampening": 0.1})


def test_a_loss_with_three_arguments_gets_the_hyperparameters() -> None:
    """What is tuned may be the loss's as well; a third argument with a default is not ours to give."""
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    got = []

    def three(output: Tensor, target: Tensor, hyperparameters: dict[str, Any]) -> Tensor:
        got.append(hyperparameters)
        return hyperparameters["scale"] * nn.functional.mse_loss(output, target)

    def default(output: Tensor, target: Tensor, extra: Any = None) -> Tensor:
        got.append(extra)
        return nn.functional.mse_loss(output, target)

    def losses(loss: Any, scale: float) -> float:
        spec = make_spec(loss=loss, epochs=1)
        task = spec.task(prepare(Splits((x, y), (x, y)), torch.device("cpu"), "here"), torch.device("cpu"))
        lone = Lone(spec.job(0, {"lr": 0.0, "batch_size": 8, "scale": scale}), task)
        return lone.epoch(Stopwatch())[0].validation["loss"]

    plain = losses(default, 1.0)
    assert got
    assert set(got) == {None}
    got.clear()
    assert losses(three, 3.0) == pytest.approx(3 * plain)
    assert got[0]["scale"] == 3.0


def test_demanded_arguments_are_counted() -> None:
    """Functions, methods and modules; a default is no demand."""
    assert required_arguments(nn.functional.cross_entropy) == 2
    assert required_arguments(nn.CrossEntropyLoss()) < 3
    assert required_arguments(lambda output, target, hyperparameters: 0) == 3
    assert required_arguments(lambda output, target, *, hyperparameters=None: 0) == 2
    assert required_arguments(max) == 2


def test_a_model_that_is_no_module_says_what_it_is() -> None:
    """`model` returns a torch.nn.Module."""
    job = make_spec(model=lambda hyperparameters: "linear").job(0, {"lr": 0.1, "batch_size": 4})
    with pytest.raises(SpecError, match=r"model\(\) must return a torch\.nn\.Module; found str"):
        job.model()


def test_an_error_is_one_line_with_its_place() -> None:
    """Type, first line of the message, file and line."""
    try:
        raise RuntimeError("first line \n second line")
    except RuntimeError as error:
        line = one_line(error)
    assert line.startswith("RuntimeError: first line (test_spec.py:")
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 5000))) < 400


def test_optuna_is_quiet_in_a_block_and_as_before_behind_it() -> None:
    """Its level is the user's again, also when the block raises."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        with suppress(KeyError), quiet_optuna():
            assert optuna.logging.get_verbosity() == optuna.logging.WARNING
            raise KeyError
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(before)


def test_a_loss_that_is_an_object_is_made_anew_for_each_trial() -> None:
    """What it remembers of one trial does not reach the next one; a function is taken as it is."""

    class Remembers:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, output: Any, target: Any) -> Any:
            self.calls += 1
            return nn.functional.mse_loss(output, target)

    loss = Remembers()
    hyperparameters = {"lr": 0.1, "batch_size": 4}
    parts = {"name": "x", "data": lambda: None, "space": lambda trial: {}, "model": lambda h: nn.Linear(1, 1)}
    first, second = (StudySpec(**parts, loss=loss).job(n, hyperparameters) for n in range(2))
    first.loss(torch.zeros(1), torch.zeros(1))
    assert (first.loss.calls, second.loss.calls, loss.calls) == (1, 0, 0)
    assert StudySpec(**parts, loss=nn.functional.mse_loss).job(0, hyperparameters).loss is nn.functional.mse_loss
