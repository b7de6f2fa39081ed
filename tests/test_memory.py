"""What does not fit the memory is trained in smaller pieces, with the same result; what still does not fit ends so."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.study_files import study_file, trials
from tuner.clock import Stopwatch
from tuner.data import Resident
from tuner.microbatch import smaller
from tuner.run import main
from tuner.train import SGD, EpochResult, Job, Lone, Task

CPU = torch.device("cpu")


class SmallDevice(TorchDispatchMode):
    """A device whose memory ends: it counts the bytes of all living storages that were made while it is on."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.used, self.peak, self.refused = limit, 0, 0, 0
        self._living: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        if self.used > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"{self.used} bytes are wanted, the limit is {self.limit}")
        self.peak = max(self.peak, self.used)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._living and self._living[key][0]() is not None:
            return

        def gone(reference: Any) -> None:
            self.used -= size
            if self._living[key][0] is reference:  # Not yet the number of a younger one.
                del self._living[key]

        self._living[key] = (weakref.ref(storage, gone), size)
        self.used += size


DATA = """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(900, 8, generator=generator)
        y = torch.tanh(x.sum(dim=1, keepdim=True))
        return Splits((x[:600], y[:600]), (x[600:], y[600:]))
"""
SPACE = """
        return {"lr": trial.suggest_float("lr", 1e-3, 0.1), "batch_size": 256, "momentum": 0.5}
"""
MODEL = "return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))"
NORMED = "return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))"

Tune = Callable[..., tuple[int, str, list[FrozenTrial]]]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Four epochs of some trials in a device of so many bytes: exit code, what was said, trials."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(n: int, lanes: int, limit: float, **parts: str) -> tuple[int, str, list[FrozenTrial]]:
        shared = {"data": DATA, "space": SPACE, "model": MODEL, "spec": 'name="tiny", epochs=4', **parts}
        study_file(tmp_path, **shared)
        storage = tmp_path / f"{n}-{lanes}-{limit}.db"
        arguments = ["--study", "tiny.py", "--storage", str(storage), "--n-trials", str(n), "--lanes", str(lanes)]
        with SmallDevice(limit):
            code = main([*arguments, "--sampler", "random", "--seed", "1", "--pruner", "none", "--device", "cpu"])
        return code, capsys.readouterr().err, trials(storage)

    return call


def assert_alike(found: list[FrozenTrial], whole: list[FrozenTrial]) -> None:
    """All are complete, and each has the learning curve that it has where memory is no matter."""
    assert {t.state for t in found} == {TrialState.COMPLETE}
    for mine, other in zip(found, whole, strict=True):
        assert mine.params == other.params
        assert mine.intermediate_values == pytest.approx(other.intermediate_values, rel=1e-4)
        assert mine.user_attrs["train_loss"] == pytest.approx(other.user_attrs["train_loss"], rel=1e-4)


def test_a_stack_that_does_not_fit_is_trained_as_smaller_ones(tune: Tune) -> None:
    """Of sixteen lanes four fit: every trial is complete with its lone result, and each width is said once."""
    code, err, found = tune(16, 16, 1e6)
    assert code == 0, err
    said = [line for line in err.splitlines() if "a stack of" in line]
    assert [line.partition(" trials failed (out of memory: ")[0] for line in said] == ["a stack of 16", "a stack of 8"]
    assert [line.rpartition("; ")[2] for line in said] == [
        "it is trained again as two of 8",
        "it is trained again as two of 4",
    ]
    assert {t.user_attrs["lanes"] for t in found} == {4}
    assert_alike(found, tune(16, 1, float("inf"))[2])


def test_a_trial_that_does_not_fit_is_trained_in_parts(tune: Tune) -> None:
    """A batch of 256 does not fit and one of 64 does: the same result, said in one line."""
    code, err, found = tune(2, 1, 150e3)
    assert code == 0, err
    how = "did not fit the memory; it is trained and evaluated 64 examples at a time (its batches stay 256)"
    assert [line for line in err.splitlines() if "did not fit" in line] == [f"trial {n} {how}" for n in (0, 1)]
    assert [t.user_attrs["micro_batch"] for t in found] == [64, 64]
    assert_alike(found, tune(2, 1, float("inf"))[2])


def test_a_trial_that_does_not_fit_at_all_fails_with_the_figures(tune: Tune) -> None:
    """Its weights and their gradients are too large: every trial is tried and fails, exit code 3."""
    code, err, found = tune(2, 1, 200e3, model="return nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 1))")
    assert code == 3, err
    assert [t.state for t in found] == [TrialState.FAIL] * 2
    for trial in found:
        assert "out of memory" in trial.user_attrs["reason"]
        assert "the limit is 200000" in trial.user_attrs["reason"]
        assert " MB were in use" in trial.user_attrs["reason"]


def test_a_batch_that_cannot_be_split_fails_with_the_reason(tune: Tune) -> None:
    """Batch norm's statistics are those of a whole batch, which does not fit."""
    code, err, found = tune(2, 1, 200e3, model=NORMED)
    assert code == 3, err
    assert [t.state for t in found] == [TrialState.FAIL] * 2
    for trial in found:
        assert "256 examples at a time do not fit, and a batch of them cannot be split" in trial.user_attrs["reason"]


def test_nothing_of_a_failed_attempt_stays_alive(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a smaller attempt begins, as many bytes are alive as before the first one, without a garbage collection."""
    at: list[tuple[str, int]] = []
    here: list[SmallDevice] = []
    enter = SmallDevice.__enter__
    monkeypatch.setattr(SmallDevice, "__enter__", lambda self: (here.append(self), enter(self))[1])
    monkeypatch.setattr("tuner.device.reset_peak", lambda _: at.append(("build", here[-1].used)))
    monkeypatch.setattr("tuner.device.release", lambda _: at.append(("failed", here[-1].used)))
    gc.disable()
    try:
        assert tune(1, 1, 150e3)[0] == 0
        # Of the first stack that fails, too, though what was recorded for its kind stays.
        first = list(at)
        assert tune(8, 8, 500e3)[0] == 0
    finally:
        gc.enable()
    assert [what for what, _ in first] == ["build", "failed", "failed", "failed"]
    assert {used for what, used in first if what == "failed"} == {first[0][1]}
    stacks = at[len(first) :]
    assert [what for what, _ in stacks[:2]] == ["build", "failed"]
    assert stacks[1][1] < stacks[0][1] + 20_000


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def task_of() -> Task:
    """75 examples of 12 numbers, sorted by their class."""
    x = torch.randn(75, 12, generator=torch.Generator().manual_seed(5))
    source = Resident((x, torch.arange(75) // 25), CPU)
    return Task(source, source, {"accuracy": accuracy}, 3, CPU)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def job(model: Callable[[], nn.Module] = plain, loss: Any = nn.functional.cross_entropy, batch_size: int = 32) -> Job:
    return Job(0, model, loss, SGD(lr=0.1, batch_size=batch_size, momentum=0.9, weight_decay=0.01), seed=1)


def epochs_of(trainer: Lone) -> list[EpochResult]:
    return [trainer.epoch(Stopwatch())[0] for _ in range(3)]


@pytest.mark.parametrize("micro_batch", [1, 5, 16, 31, 32])
def test_micro_batches_add_up_to_the_batch(micro_batch: int) -> None:
    """Also where they do not divide it, and in an epoch's last batch of 11 examples."""
    whole, parts = Lone(job(), task_of()), Lone(job(), task_of(), micro_batch=micro_batch)
    for a, b in zip(epochs_of(whole), epochs_of(parts), strict=True):
        assert b.train_loss == pytest.approx(a.train_loss, rel=1e-4)
        assert b.validation == pytest.approx(a.validation, rel=1e-4)
    for name, value in whole.weights(0).items():
        torch.testing.assert_close(parts.weights(0)[name], value, rtol=1e-4, atol=1e-6)


def test_the_examples_at_a_time_are_halved_down_to_one() -> None:
    """First the evaluation shrinks to the size of a batch, and what is larger than that is halved at once."""
    task, found = task_of(), []
    made: Lone | str | None = smaller(job(), task, None)
    while isinstance(made, Lone):
        found.append(made.micro_batch)
        made = smaller(job(), task, made.micro_batch)
    assert found == [32, 16, 8, 4, 2, 1]
    assert made == "not even one example at a time fits (batch size 32)"
    large = smaller(job(batch_size=4096), task, None)
    assert isinstance(large, Lone)
    assert large.micro_batch == 75


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 9.0]))


def added(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (job(loss=added), "is not the mean"),
        (job(loss=weighted), "is not the mean"),
        (job(lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3))), "is not the mean"),
        (job(lambda: nn.Sequential(nn.Dropout(0.5), plain())), "is not the mean"),
        (job(lambda: nn.Sequential(nn.Dropout(0.0), plain())), "draws random numbers"),
    ],
    ids=["a sum", "weights of classes", "batch norm", "dropout", "dropout of nothing"],
)
def test_what_is_no_mean_over_examples_is_not_split(one: Job, why: str) -> None:
    """It is evaluated in smaller batches, and goes no further."""
    assert isinstance(smaller(one, task_of(), None), Lone)
    found = smaller(one, task_of(), 32)
    assert isinstance(found, str)
    assert why in found
    assert "32 examples at a time do not fit, and a batch of them cannot be split" in found
