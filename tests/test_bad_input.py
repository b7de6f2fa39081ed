"""Bad input is one line on stderr, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest

from tests.study_files import study_file
from tuner.errors import TunerError
from tuner.run import main


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a study file makes its neighbours importable: for this test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@dataclass
class Case:
    """Arguments beside the study; parts of its file; what else is there; words of the error."""

    words: list[str]
    arguments: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    before: Callable[[Path], object] | None = None


def database(statement: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "tuner.db")) as connection:
            connection.execute(statement)
            connection.commit()

    return make


def damaged(folder: Path) -> None:
    """The first bytes of a database, then nothing that makes sense."""
    (folder / "tuner.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 30)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def plain_study(**arguments: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'tuner.db'}")
        optuna.create_study(storage=storage, study_name="tiny", **arguments)  # type: ignore[arg-type]
        storage.engine.dispose()

    return make


SPLITS = "x = torch.randn(9, 3)\ny = x[:, :1]\n"

CASES = {
    # The study file.
    "no such study": Case(["--study nonsense", "digits_mlp"], ["--study", "nonsense"]),
    "no such file": Case(["--study absent.py", "no such file"], ["--study", "absent.py"]),
    "no such module": Case(["no_such_module_here", "does not import"], ["--study", "no_such_module_here:spec"]),
    "no spec in a module": Case(["json:spec", "wanted a variable 'spec'"], ["--study", "json:spec"]),
    "syntax error": Case(["tiny.py: does not import: line", "SyntaxError"], parts={"head": "def :"}),
    "import error": Case(["tiny.py", "ModuleNotFoundError"], parts={"head": "import no_such_module_here"}),
    "raises at import": Case(["tiny.py", "ZeroDivisionError"], parts={"head": "1 / 0"}),
    "no spec": Case(["tiny.py", "wanted a variable 'spec'"], before=text("tiny.py", "x = 1\n")),
    "spec of another type": Case(["tiny.py", "found int"], before=text("tiny.py", "spec = 3\n")),
    "unknown argument": Case(["tiny.py", "epoch"], parts={"spec": 'name="tiny", epoch=3'}),
    "no epochs": Case(["tiny.py", "epochs must be a positive"], parts={"spec": 'name="tiny", epochs=0'}),
    "unknown objective": Case(["tiny.py", "objective must be one of loss, error"], parts={
        "spec": 'name="tiny", objective="accuracy"'
    }),
    # Its data.
    "data raises": Case(["tiny.py: data() raised FileNotFoundError", "(tiny.py:"], parts={
        "data": "raise FileNotFoundError('no pictures')"
    }),
    "data of another type": Case(["tiny.py: data() must return tuner.Splits"], parts={"data": "return [1, 2]"}),
    "empty split": Case(["tiny.py: the validation split is empty"], parts={
        "data": SPLITS + "return Splits((x, y), (x[:0], y[:0]))"
    }),
    "different lengths": Case(["tiny.py: the train split has tensors of different lengths: 8, 9"], parts={
        "data": SPLITS + "return Splits((x, y[:-1]), (x, y))"
    }),
    "numpy data": Case(["tiny.py: the train split must be", "numpy.ndarray"], parts={
        "data": SPLITS + "return Splits((x.numpy(), y.numpy()), (x, y))"
    }),
    "data set that raises": Case(["tiny.py: the train split", "no such picture"], parts={
        "head": "class Broken(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i): raise OSError('no such picture')\n",
        "data": SPLITS + "return Splits(Broken(), (x, y))",
    }),
    "later items raise": Case(["tiny.py", "no such picture"], parts={
        "head": "class Broken(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i):\n"
        "        if i: raise OSError('no such picture')\n"
        "        return torch.ones(3), torch.ones(1)\n",
        "data": SPLITS + "return Splits(Broken(), (x, y))",
    }),
    # Its space.
    "space raises": Case(["tiny.py: space() raised KeyError"], parts={"space": "raise KeyError('x')"}),
    "space returns nothing": Case(["tiny.py: space() must return a dictionary"], parts={"space": "pass"}),
    "no lr": Case(["tiny.py: space() must return 'lr'"], parts={"space": 'return {"batch_size": 4}'}),
    "batch size 0": Case(["tiny.py: batch_size must be a positive"], parts={
        "space": 'return {"lr": 0.1, "batch_size": 0}'
    }),
    "unknown schedule": Case(["tiny.py: schedule must be one of constant"], parts={
        "space": 'return {"lr": 0.1, "batch_size": 4, "schedule": "linear"}'
    }),
    # Its model, loss and metrics.
    "model raises": Case(["tiny.py: a training step with lr=", "NameError", "(tiny.py:"], parts={
        "model": "return nothing"
    }),
    "model is no module": Case(["tiny.py", "model() must return a torch.nn.Module; found int"], parts={
        "model": "return 3"
    }),
    "wrong shapes": Case(["tiny.py: a training step with", "RuntimeError"], parts={"model": "return nn.Linear(4, 1)"}),
    "wrong validation shapes": Case(["tiny.py: a training step with", "RuntimeError"], parts={
        "data": SPLITS + "return Splits((x, y), (x[:, :2], y))"
    }),
    "wrong validation targets": Case(["tiny.py: a training step with"], parts={
        "data": SPLITS + "return Splits((x, y), (x, y.expand(-1, 5)))",
        "loss": "assert output.shape == target.shape\nreturn nn.functional.mse_loss(output, target)",
        "metric": "return 0.0",
    }),
    "loss with dimensions": Case(["tiny.py", "loss() must return the mean", "(4, 1)"], parts={
        "loss": "return (output - target) ** 2",
        "space": 'return {"lr": 0.1, "batch_size": 4}',
    }),
    "loss is a number": Case(["tiny.py", "loss() must return", "found float"], parts={"loss": "return 0.5"}),
    "metric with dimensions": Case(["tiny.py", "metric 'error' must return one number"], parts={
        "metric": "return output - target"
    }),
    "metric is text": Case(["tiny.py"], parts={"metric": "return 'good'"}),
    "nothing to train": Case(["tiny.py", "a training step with"], parts={
        "model": "return nn.Linear(3, 1).requires_grad_(False)"
    }),
    # The command line.
    "unknown sampler": Case(["--sampler best", "tpe, gp"], ["--sampler", "best"]),
    "unknown pruner": Case(["--pruner best", "none, median"], ["--pruner", "best"]),
    "threshold without a value": Case(["--pruner threshold", "--threshold VALUE"], ["--pruner", "threshold"]),
    "unknown objective on the command line": Case(["--objectives speed", "wall_time"], ["--objectives", "speed"]),
    "objective without direction": Case(["--objectives error", "error:maximize"], ["--objectives", "error"]),
    "pruner with two objectives": Case(
        ["--pruner median", "several objectives"], ["--objectives", "loss", "wall_time", "--pruner", "median"]
    ),
    "negative trials": Case(["--n-trials -1", "a number from 0"], ["--n-trials", "-1"]),
    "negative total": Case(["--total-trials -5", "a number from 0"], ["--total-trials", "-5"]),
    "negative timeout": Case(["--timeout -1", "a number from 0"], ["--timeout", "-1"]),
    "timeout nan": Case(["--timeout nan", "a number from 0"], ["--timeout", "nan"]),
    "no workers": Case(["--workers 0", "a number from 1"], ["--workers", "0"]),
    "no threads": Case(["--threads 0", "a number from 1"], ["--threads", "0"]),
    "no lanes": Case(["--lanes 0"], ["--lanes", "0"]),
    "more threads than cores": Case(["--threads 999999"], ["--threads", "999999"]),
    "more workers than a machine bears": Case(["--workers 999999"], ["--workers", "999999"]),
    "unknown device": Case(["--device quantum", "auto, cpu, cuda"], ["--device", "quantum"]),
    "second cpu": Case(["--device cpu:1", "only one cpu"], ["--device", "cpu:1"]),
    "absent device": Case(["--device xpu", "--device cpu"], ["--device", "xpu"]),
    "grid of a range": Case(["--sampler grid", "lr has no steps"], ["--sampler", "grid"]),
    "weights in a file": Case(["--weights mine", "mine"], ["--weights", "mine"], before=text("mine", "x")),
    "weights below a file": Case(["--weights mine/x", "mine"], ["--weights", "mine/x"], before=text("mine", "x")),
    # Points.
    "no points": Case(["--enqueue absent.json", "No such file"], ["--enqueue", "absent.json"]),
    "points are no JSON": Case(["--enqueue p.json", "JSON"], ["--enqueue", "p.json"], before=text("p.json", "lr=1")),
    "points are numbers": Case(["--enqueue p.json", "found 3"], ["--enqueue", "p.json"], before=text("p.json", "[3]")),
    "points of another space": Case(
        ["--enqueue p.json", "no parameter 'rate'"], ["--enqueue", "p.json"], before=text("p.json", '[{"rate": 1}]')
    ),
    "points outside": Case(
        ["--enqueue p.json", "lr = 7 is outside"], ["--enqueue", "p.json"], before=text("p.json", '{"lr": 7}')
    ),
    # The storage.
    "directory as storage": Case(["directory"], ["--storage", "."]),
    "missing directory": Case(["no/where", "mkdir -p"], ["--storage", "no/where/tuner.db"]),
    "another database": Case(["mysql://"], ["--storage", "mysql://user@host/name"]),
    "a password in the URL": Case(["mysql://user:***@host"], ["--storage", "mysql://user:secret@host/name"]),
    "text as storage": Case(["tuner.db", "another kind of file"], before=text("tuner.db", "hello, this is text")),
    "damaged database": Case(["tuner.db", "database"], before=damaged),
    "foreign database": Case(["tuner.db", "another program"], before=database("CREATE TABLE songs (title TEXT)")),
    # What is stored.
    "other direction": Case(
        ["it was to maximize, now minimize", "--study-name"], before=plain_study(direction="maximize")
    ),
    "other number of objectives": Case(
        ["it was to minimize and minimize"], before=plain_study(directions=["minimize", "minimize"])
    ),
}  # fmt: skip


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and what is in it; compiled Python and SQLite's own helpers are nobody's business."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("kind", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line that starts with "error:" and says what and where, no file made or changed."""
    case = CASES[kind]
    study_file(tmp_path, **case.parts)
    if case.before is not None:
        case.before(tmp_path)
    before = listing(tmp_path)
    assert main(["--study", "tiny.py", *case.arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for word in case.words:
        assert word in err
    assert "secret" not in err
    after = listing(tmp_path)
    if kind.startswith("other "):  # an intact database was opened: SQLite may have turned its write-ahead log on
        assert set(after) == set(before)
    else:
        assert after == before


@pytest.mark.parametrize("kind", ["space raises", "data raises", "text as storage", "negative trials"])
def test_debug_raises_what_is_one_line_otherwise(kind: str, tmp_path: Path) -> None:
    """`--debug` shows the traceback, with what caused it."""
    case = CASES[kind]
    study_file(tmp_path, **case.parts)
    if case.before is not None:
        case.before(tmp_path)
    with pytest.raises(TunerError) as caught:
        main(["--study", "tiny.py", "--debug", *case.arguments])
    if kind.endswith("raises"):
        assert isinstance(caught.value.__cause__, (KeyError, FileNotFoundError))


def test_a_process_of_torchrun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WORLD_SIZE above 1: one device a trial, said in one line; a WORLD_SIZE of 1 is nobody's business."""
    study_file(tmp_path)
    before = listing(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--study", "tiny.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: WORLD_SIZE is above 1")
    assert err.count("\n") == 1
    assert listing(tmp_path) == before
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["--study", "tiny.py", "--n-trials", "1"]) == 0


def test_a_number_that_is_none_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line's own check: usage and one line, exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(["--n-trials", "many"])
    assert caught.value.code == 2
    assert "--n-trials" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_two_different_spaces_on_one_study_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second command says which parameter was and is what, and how to start anew; which then works."""
    study_file(tmp_path)
    assert main(["--study", "tiny.py", "--n-trials", "1"]) == 0
    study_file(tmp_path, "other.py", space='return {"lr": trial.suggest_float("lr", 0.5, 0.6), "batch_size": 4}')
    before = listing(tmp_path)
    capsys.readouterr()
    assert main(["--study", "other.py", "--n-trials", "1", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in ("lr was 0.001 to 0.3 (log), now 0.5 to 0.6", "batch_size was one of 2, 4, now not there", "other.py"):
        assert word in err
    assert listing(tmp_path) == before
    assert main(["--study", "other.py", "--n-trials", "1", "--study-name", "fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["study"] == "fresh"


def test_an_empty_file_is_an_empty_storage(tmp_path: Path) -> None:
    """As one that `mktemp` made."""
    study_file(tmp_path)
    (tmp_path / "tuner.db").touch()
    assert main(["--study", "tiny.py", "--n-trials", "1"]) == 0
