"""bfloat16 by autocast, alone and in stacks."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_files import study_file

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import prepare
from tuner.run import main
from tuner.spec import explore
from tuner.stack import Stack
from tuner.study_file import load_spec
from tuner.train import Job, Lone, Task


@pytest.fixture
def digits() -> tuple[Task, list[Job]]:
    loaded = load_spec("digits_mlp")
    device = torch.device("cpu")
    task = loaded.spec.task(prepare(loaded.spec.data(), device, loaded.origin), device, "bf16")
    jobs = [loaded.spec.job(i, h) for i, h in enumerate(explore(loaded).samples[:4])]
    return task, [replace(job, sgd=replace(job.sgd, lr=0.05, momentum=0.5)) for job in jobs]


def losses(task: Task, job: Job, epochs: int) -> list[float]:
    trainer, watch = Lone(job, task), Stopwatch()
    return [trainer.epoch(watch)[0].validation["loss"] for _ in range(epochs)]


def test_bf16_rounds_and_still_learns(digits: tuple[Task, list[Job]]) -> None:
    """Its losses differ from those in float32, by little."""
    task, jobs = digits
    coarse, fine = losses(task, jobs[0], 3), losses(replace(task, precision="float32"), jobs[0], 3)
    assert coarse != fine
    assert coarse == pytest.approx(fine, rel=0.05)
    assert coarse[-1] < coarse[0]


def test_lanes_in_bf16_give_what_lone_trials_give_within_its_rounding(digits: tuple[Task, list[Job]]) -> None:
    """Weights and losses are kept in float32; products are rounded to 8 bits in both ways."""
    task, jobs = digits
    made = Assembler(task).assemble(jobs, 4)
    assert made.notices == []
    assert all(isinstance(trainer, Stack) for trainer in made.trainers)
    watch = Stopwatch()
    for _ in range(3):
        results = [result for trainer in made.trainers for result in trainer.epoch(watch)]
    for result in results:
        assert result.validation["loss"] == pytest.approx(losses(task, jobs[result.number], 3)[-1], rel=0.03)
    assert made.trainers[0].weights(made.trainers[0].numbers[0])["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_run_says_its_precision(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its first lines; its trials are complete."""
    file = study_file(tmp_path)
    storage = tmp_path / "tuner.db"
    arguments = ["--study", str(file), "--storage", str(storage), "--n-trials", "2", "--precision", precision]
    assert main(arguments) == 0
    assert f", {precision} (" in capsys.readouterr().err.splitlines()[1]
    (count,) = sqlite3.connect(storage).execute("SELECT count(*) FROM trials WHERE state = 'COMPLETE'").fetchone()
    assert count == 2
    assert not torch.is_autocast_enabled("cpu")
