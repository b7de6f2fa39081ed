"""What a study found, against studies whose contents are known."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner import report
from tuner.figures import measure

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
SPACE = {"lr": FloatDistribution(0.001, 1.0, log=True), "batch_size": CategoricalDistribution([32, 64])}
BEGIN = datetime(2026, 1, 2, 3, 4, 5)


def trial(
    state: TrialState, start: float, end: float | None, values: list[float] | None = None, **attributes: Any
) -> FrozenTrial:
    """A trial that ran from `start` to `end` seconds after BEGIN, with lr=0.1 and batch_size=32."""
    made = create_trial(
        state=state,
        values=values,
        params={"lr": 0.1, "batch_size": 32},
        distributions=SPACE,
        user_attrs=attributes,
    )
    made.datetime_start = BEGIN + timedelta(seconds=start)
    made.datetime_complete = None if end is None else BEGIN + timedelta(seconds=end)
    return made


def timed(wall_time: float) -> dict[str, float]:
    """The attributes of a trial whose parts are a tenth, a half, a quarter and an eighth of its wall time."""
    shares = {"build_seconds": 0.1, "train_seconds": 0.5, "validate_seconds": 0.25, "wait_seconds": 0.125}
    device = {"device_seconds": 0.5 * wall_time}
    return {"wall_time": wall_time} | {name: share * wall_time for name, share in shares.items()} | device


KNOWN = [
    trial(COMPLETE, 0, 2, [0.5], **timed(2.0), device="cpu"),
    trial(COMPLETE, 2, 6, [0.25], **timed(4.0), device="cpu", accuracy=0.975),
    trial(COMPLETE, 2, 4, [math.inf], **timed(1.0)),
    trial(COMPLETE, 10, 12, [0.75]),
    trial(PRUNED, 12, 13, **timed(1.0), reason="worse than the median"),
    trial(FAIL, 13, 14, reason="loss is nan at epoch 3"),
    trial(FAIL, 14, 15, reason="out of memory"),
    trial(FAIL, 15, 16, reason="loss is nan at epoch 3"),
    trial(FAIL, 16, 20),
    trial(RUNNING, 20, None),
]


def make_study(
    path: Path, trials: list[FrozenTrial], *, name: str = "digits", metrics: tuple[str, ...] = ("validation loss",),
    directions: tuple[str, ...] = ("minimize",),
) -> optuna.Study:  # fmt: skip
    """A study in a file; without `metrics` it is what a plain Optuna script makes."""
    storage = RDBStorage(f"sqlite:///{path}")
    study = optuna.create_study(storage=storage, study_name=name, directions=list(directions))
    if metrics:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names(list(metrics))
    study.add_trials(trials)
    storage.engine.dispose()
    return study


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command on ``tuner.db`` in the working directory."""
    code = report.main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def strict(text: str) -> Any:
    """`text` as JSON, without the NaN and Infinity that Python would accept."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_number_of_a_known_study(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, best, order, sums of the parts, pace and failures, as one strict JSON document."""
    make_study(cwd / "tuner.db", KNOWN)
    code, out, errors = run(capsys, "--json", "--top", "2")
    assert (code, errors) == (0, "")
    found = strict(out)
    assert found["study"] == "digits"
    assert found["storage"] == f"sqlite:///{cwd / 'tuner.db'}"
    assert (found["metrics"], found["directions"]) == (["validation loss"], ["minimize"])
    assert found["counts"] == {"complete": 4, "pruned": 1, "failed": 4, "running": 1, "waiting": 0}
    assert (found["best"]["number"], found["best"]["values"], found["best"]["seconds"]) == (1, [0.25], 4.0)
    assert found["best"]["params"] == {"lr": 0.1, "batch_size": 32}
    assert found["best"]["attributes"] == {**timed(4.0), "device": "cpu", "accuracy": 0.975}
    assert [row["number"] for row in found["top"]] == [1, 0]
    assert found["front"] == []
    assert (found["first_start"], found["last_end"]) == ("2026-01-02T03:04:05", "2026-01-02T03:04:25")
    # Nine trials ended within 20 s; none ran from second 6 to 10.
    assert (found["span_seconds"], found["busy_seconds"], found["trials_per_minute"]) == (20.0, 16.0, 27.0)
    assert (found["timed_trials"], found["wall_time"], found["device_seconds"]) == (4, 8.0, 4.0)
    parts = {"build_seconds": 0.8, "train_seconds": 4.0, "validate_seconds": 2.0, "wait_seconds": 1.0}
    assert found["parts"] == pytest.approx(parts)
    assert list(found["failures"].items()) == [
        ("loss is nan at epoch 3", 2), ("out of memory", 1), ("no reason stored", 1)
    ]  # fmt: skip


def test_the_text_of_a_known_study(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers as tables: nothing is cut, however wide."""
    make_study(cwd / "tuner.db", KNOWN)
    code, out, errors = run(capsys)
    assert (code, errors) == (0, "")
    assert (
        out
        == f"""\
study    digits
storage  sqlite:///{cwd / "tuner.db"}
value    validation loss (minimize)
trials   4 complete, 1 pruned, 4 failed, 1 running, 0 waiting
pace     27 trials per minute over 20.0 s, in 16.0 s of which trials ran
best     trial 1, validation loss 0.25

hyperparameters of the best trial
  lr          0.1
  batch_size  32

attributes of the best trial
  accuracy          0.975
  build_seconds     0.4
  device            cpu
  device_seconds    2
  train_seconds     2
  validate_seconds  1
  wait_seconds      0.5
  wall_time         4

best 3 trials
  trial  validation loss  seconds  lr   batch_size
  1      0.25             4        0.1  32
  0      0.5              2        0.1  32
  3      0.75             2        0.1  32

where the time of 4 trials went
  part       seconds  share    per trial
  build      0.800    10.0 %   0.2000
  train      4.000    50.0 %   1.0000
  validate   2.000    25.0 %   0.5000
  wait       1.000    12.5 %   0.2500
  other      0.200    2.5 %    0.0500
  wall time  8.000    100.0 %  2.0000
  device     4.000    50.0 %   1.0000

failures by reason
  2  loss is nan at epoch 3
  1  out of memory
  1  no reason stored
"""
    )


def test_a_plain_optuna_study_is_reported(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without names or attributes of ours: values, durations by Optuna's clock, maximize, conditional parameters."""
    one = create_trial(value=0.5, params={"a": 0.1}, distributions={"a": FloatDistribution(0, 1)})
    two = create_trial(value=0.75, params={"b": 0.2}, distributions={"b": FloatDistribution(0, 1)})
    make_study(cwd / "plain.db", [one, two], name="plain", metrics=(), directions=("maximize",))
    code, out, _ = run(capsys, "--storage", "plain.db")
    assert code == 0
    assert "\nvalue    value (maximize)\n" in out
    assert "\nbest     trial 1, value 0.75\n" in out
    lines = out.splitlines()
    table = lines[lines.index("best 2 trials") + 1 :]
    assert [line.split()[:2] + line.split()[-2:] for line in table[:3]] == [
        ["trial", "value", "b", "a"] if "b  " in table[0] else ["trial", "value", "a", "b"],
        ["1", "0.75", *table[1].split()[-2:]],
        ["0", "0.5", *table[2].split()[-2:]],
    ]
    assert {table[1].split()[-1], table[1].split()[-2]} == {"0.2", "-"}
    assert "where the time" not in out
    assert strict(run(capsys, "--storage", "plain.db", "--json")[1])["timed_trials"] == 0


def test_several_objectives_have_a_front(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trials that no other beats in every value, by number; none is best; directions count."""
    values = [[1.0, 5.0], [2.0, 6.0], [2.0, 4.0], [3.0, 9.0], [0.5, 9.0], [0.5, 9.0], [math.inf, 99.0], [0.75, 5.0]]
    make_study(
        cwd / "tuner.db",
        [trial(COMPLETE, i, i + 1, pair) for i, pair in enumerate(values)],
        metrics=("loss", "accuracy"),
        directions=("minimize", "maximize"),
    )
    found = strict(run(capsys, "--json")[1])
    assert (found["best"], found["top"]) == (None, [])
    assert [row["number"] for row in found["front"]] == [4, 5]
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{cwd / 'tuner.db'}")
    assert [row["number"] for row in found["front"]] == [t.number for t in study.best_trials if t.number != 6]
    code, out, _ = run(capsys)
    assert code == 0
    assert "value    loss (minimize), accuracy (maximize)" in out
    assert "Pareto front: 2 trials that no other beats in every value\n  trial  loss  accuracy  seconds" in out


def test_the_front_is_optunas() -> None:
    """On 300 random trials of three values the front is the one that Optuna finds."""
    import random

    draw = random.Random(1)
    study = optuna.create_study(directions=["minimize", "maximize", "minimize"])
    for i in range(300):
        study.add_trial(trial(COMPLETE, i, i + 1, [draw.randrange(12), draw.randrange(12), draw.randrange(12)]))
    front = [row.number for row in measure(study, "memory", 10).front]
    assert front == sorted(t.number for t in study.best_trials)
    assert 3 < len(front) < 100


def test_json_holds_what_is_not_finite_as_text(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinities in attributes are no JSON numbers: they become text, and the document stays strict."""
    attributes: dict[str, Any] = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "wall_time": math.nan, "d": None}
    make_study(cwd / "tuner.db", [trial(COMPLETE, 0, 1, [0.5], **attributes)])
    found = strict(run(capsys, "--json")[1])
    assert found["best"]["attributes"] == {"a": "nan", "b": ["inf", {"c": "-inf"}], "wall_time": "nan", "d": None}
    assert found["timed_trials"] == 0
    assert found["best"]["seconds"] == 1.0


def test_a_study_must_be_chosen_among_several(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None named: all are listed with their counts, exit 2; a wrong name: the nearest is offered; a right one works."""
    make_study(cwd / "tuner.db", KNOWN[:3], name="digits-mlp")
    make_study(cwd / "tuner.db", [], name="digits-cnn")
    code, out, errors = run(capsys)
    assert (code, out) == (2, "")
    assert errors == (
        "studies in this storage:\n  digits-cnn  0 trials\n  digits-mlp  3 trials\n"
        f"error: wanted one study, found 2 in sqlite:///{cwd / 'tuner.db'}; choose one with --study-name\n"
    )
    code, out, errors = run(capsys, "--study-name", "digits-mpl")
    assert (code, out) == (2, "")
    assert errors.endswith("did you mean 'digits-mlp'?\n")
    assert errors.count("\n") == 1
    code, out, errors = run(capsys, "--study-name", "digits-mlp")
    assert (code, out.splitlines()[0], errors) == (0, "study    digits-mlp", "")


def test_an_empty_study_says_so(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3, as for a study in which no trial is complete."""
    make_study(cwd / "tuner.db", [])
    code, out, _ = run(capsys)
    assert code == 3
    assert "trials   none yet\n" in out
    assert strict(run(capsys, "--json")[1])["best"] is None
    make_study(cwd / "failed.db", [KNOWN[5]])
    code, out, _ = run(capsys, "--storage", "failed.db")
    assert code == 3
    assert "  1  loss is nan at epoch 3\n" in out


def test_the_csv_has_a_row_for_each_trial(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All states, all digits, all attributes; a file that cannot be written is an error."""
    trials = [trial(COMPLETE, 0, 1.5, [0.1 + 0.2], note='a "quoted", text\nof two lines'), KNOWN[5], KNOWN[9]]
    make_study(cwd / "tuner.db", trials)
    code, out, errors = run(capsys, "--csv", "out.csv")
    assert (code, out.splitlines()[0], errors) == (0, "study    digits", "wrote out.csv\n")
    with open(cwd / "out.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "number", "state", "value", "datetime_start", "datetime_complete", "params_batch_size", "params_lr",
        "user_attrs_note", "user_attrs_reason",
    ]  # fmt: skip
    assert [row["state"] for row in rows] == ["COMPLETE", "FAIL", "RUNNING"]
    assert [row["value"] for row in rows] == [repr(0.1 + 0.2), "", ""]
    assert rows[0]["user_attrs_note"] == 'a "quoted", text\nof two lines'
    assert (rows[0]["datetime_complete"], rows[2]["datetime_complete"]) == ("2026-01-02T03:04:06.500000", "")
    assert rows[1]["user_attrs_reason"] == "loss is nan at epoch 3"
    code, out, errors = run(capsys, "--csv", "none/out.csv")
    assert (code, out) == (2, "")
    assert errors == "error: wanted to write none/out.csv, found: No such file or directory; name another file\n"


def test_control_characters_stay_out_of_the_tables(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks and colors in reasons and attributes never reach the terminal, and no line is torn."""
    evil = "a\nb\x1b[31m\rc"
    make_study(cwd / "tuner.db", [trial(COMPLETE, 0, 1, [0.5], x=evil), trial(FAIL, 1, 2, reason=evil)])
    out = run(capsys)[1]
    assert "\x1b" not in out
    assert "\r" not in out
    assert "  x  a b c\n" in out
    assert "  1  a b c\n" in out


def test_a_missing_or_empty_storage_is_one_line(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, nothing on stdout, no file is made."""
    code, out, errors = run(capsys)
    assert (code, out) == (2, "")
    assert errors.startswith(f"error: wanted a storage at {cwd / 'tuner.db'}, found no such file")
    assert errors.count("\n") == 1
    assert list(cwd.iterdir()) == []
    RDBStorage(f"sqlite:///{cwd / 'tuner.db'}").engine.dispose()
    code, out, errors = run(capsys)
    assert (code, out) == (2, "")
    assert errors.startswith("error: wanted a study in sqlite:")


def test_the_command_is_quiet_and_loads_no_torch(cwd: Path) -> None:
    """As a process: warnings are errors, a reader that has gone (`| head`) is none, and torch is not loaded."""
    make_study(cwd / "tuner.db", KNOWN)
    command = [sys.executable, "-W", "error", "-X", "importtime", "-m", "tuner.report"]
    for gone in (False, True):
        reader, writer = os.pipe()
        with (
            open(reader, encoding="utf-8") as output,
            subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process,
        ):
            os.close(writer)
            if gone:
                output.close()
            else:
                assert output.read().startswith("study    digits\n")
            errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0
        assert [line for line in errors.splitlines() if not line.startswith("import time:")] == []
        assert "optuna.trial" in errors
        assert "torch" not in errors
