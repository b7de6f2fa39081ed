"""Recorded steps on a device that has graphs, by a stand-in that replays a step from the tensors of its recording."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_stack import job, task_of, train
from torch import Tensor

from tuner import replay, stack
from tuner.assemble import Assembler
from tuner.clock import Stopwatch


class Graph:
    """Does what a graph does: the same to the same tensors; the result is always the same tensor."""

    def __init__(self, step: replay.Step, inputs: list[Tensor], result: Tensor) -> None:
        self._step, self._inputs, self._result = step, inputs, result

    def replay(self) -> None:
        self._result.copy_(self._step(self._inputs))


def record(step: replay.Step, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> replay._Recording:
    own = [tensor.clone() for tensor in inputs]
    before = [tensor.clone() for tensor in state]
    result = step(own).clone()
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    return replay._Recording(Graph(step, own, result), own, result)


@pytest.mark.parametrize(
    "settings",
    [
        [{}, {"momentum": 0.9}, {"weight_decay": 0.1}],
        [{"batch_size": 8}, {"batch_size": 16, "momentum": 0.5}, {"batch_size": 32, "schedule": "cosine"}],
        [{"nesterov": True, "momentum": 0.9}, {"dampening": 0.5, "momentum": 0.5}, {"batch_size": 16}],
    ],
)
def test_replayed_steps_give_what_single_ones_give(
    settings: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also after a lane has left: rates, shares and batches are inputs, weights and momenta are state."""
    jobs = [job(number, **more) for number, more in enumerate(settings)]  # type: ignore[arg-type]
    plain = train(Assembler(task_of()).assemble(jobs, 8).trainers)
    monkeypatch.setattr(replay, "record", record)
    replays = []

    def settle(self: stack.Stack, settle: object = stack.Stack._settle) -> None:
        settle(self)  # type: ignore[operator]
        self._replay = replay.Replay()
        replays.append(self._replay)

    monkeypatch.setattr(stack.Stack, "_settle", settle)
    replayed = train(Assembler(task_of()).assemble(jobs, 8).trainers)
    assert replays
    assert any(r._recordings for r in replays)
    for number, results in plain.items():
        found = [(r.train_loss, r.validation) for r in replayed[number]]
        assert found == [(r.train_loss, r.validation) for r in results]


def test_lanes_that_leave_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings of the wider stack are gone with its tensors."""
    monkeypatch.setattr(replay, "record", record)
    made = Assembler(task_of()).assemble([job(number) for number in range(3)], 8)
    (trainer,) = made.trainers
    assert isinstance(trainer, stack.Stack)
    trainer._replay = replay.Replay()
    trainer.epoch(Stopwatch())
    assert trainer._replay._recordings
    trainer.leave([1])
    assert trainer._replay is None
    assert torch.isfinite(torch.tensor([r.train_loss for r in trainer.epoch(Stopwatch())])).all()
