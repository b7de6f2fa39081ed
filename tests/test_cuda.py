"""What holds on an NVIDIA GPU; skipped where there is none. `scripts/gpu_check` runs these and prints figures."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Resident, Streamed
from tuner.device import choose, describe, peak_megabytes, release, set_precision, synchronize
from tuner.stack import Stack
from tuner.train import SGD, EpochResult, Job, Lone, Task, Trainer

pytestmark = pytest.mark.cuda


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1000, 64, generator=generator), torch.randint(0, 10, (1000,), generator=generator)


def task_on(device: torch.device, streamed: bool = False) -> Task:
    source = Streamed(examples(), device) if streamed else Resident(examples(), device)
    return Task(source, source, {}, 3, device)


def job(number: int, model: object = network) -> Job:
    sgd = SGD(lr=0.01 * (number + 1), batch_size=64, momentum=0.9, weight_decay=1e-4)
    return Job(number, model, nn.functional.cross_entropy, sgd, seed=1)  # type: ignore[arg-type]


def train(trainers: list[Trainer]) -> dict[int, list[EpochResult]]:
    watch, found = Stopwatch(), {}
    for trainer in trainers:
        for _ in range(3):
            for result in trainer.epoch(watch):
                found.setdefault(result.number, []).append(result)
    return found


def test_auto_takes_the_gpu_and_says_which() -> None:
    """The accelerator that works is taken, and has its name."""
    choice = choose("auto")
    assert choice.device == torch.device("cuda", 0)
    assert torch.cuda.get_device_name(0) in describe(choice.device)


def test_a_stack_on_the_gpu_gives_what_its_trials_give_alone() -> None:
    """Losses agree within 1e-4 relative, dropout included."""
    task = task_on(choose("cuda").device)
    jobs = [job(number) for number in range(16)]
    made = Assembler(task).assemble(jobs, 64)
    assert all(isinstance(trainer, Stack) for trainer in made.trainers), made.notices
    together = train(made.trainers)
    for one in jobs:
        alone = train([Lone(one, task)])[one.number]
        assert [r.train_loss for r in together[one.number]] == pytest.approx([r.train_loss for r in alone], rel=1e-4)


def test_a_stack_replays_its_steps_as_graphs() -> None:
    """Without dropout: mixed batch sizes, a schedule and a lane that leaves give what lone trials give."""
    task = task_on(choose("cuda").device)

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    jobs = [job(number, plain) for number in range(12)]
    jobs = [
        replace(j, sgd=replace(j.sgd, batch_size=32 << j.number % 3, schedule=("constant", "cosine")[j.number % 2]))
        for j in jobs
    ]
    made = Assembler(task).assemble(jobs, 64)
    found: dict[int, list[EpochResult]] = {}
    watch = Stopwatch()
    for epoch in range(3):
        for trainer in made.trainers:
            assert isinstance(trainer, Stack)
            for result in trainer.epoch(watch):
                found.setdefault(result.number, []).append(result)
            assert trainer._replay is not None
            assert trainer._replay._recordings
            if epoch == 0:
                trainer.leave([5])
    for one in jobs:
        alone = train([Lone(one, task)])[one.number][: len(found[one.number])]
        assert [r.train_loss for r in found[one.number]] == pytest.approx([r.train_loss for r in alone], rel=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions_learn_the_same_roughly(precision: str) -> None:
    """Within their rounding of float32, alone and in a stack."""
    task = task_on(choose("cuda").device)
    exact = train([Lone(job(0), task)])[0][-1].train_loss
    try:
        set_precision(precision)
        coarse = replace(task, precision=precision)
        together = train(Assembler(coarse).assemble([job(number) for number in range(4)], 4).trainers)
        assert together[0][-1].train_loss == pytest.approx(exact, rel=0.03)
        assert train([Lone(job(0), coarse)])[0][-1].train_loss == pytest.approx(exact, rel=0.03)
    finally:
        set_precision("float32")


def test_streamed_examples_give_what_resident_ones_give() -> None:
    """From pinned memory by a thread that stays ahead: the same losses."""
    device = choose("cuda").device
    resident, streamed = (train([Lone(job(0), task_on(device, s))])[0] for s in (False, True))
    assert [r.train_loss for r in streamed] == pytest.approx([r.train_loss for r in resident], rel=1e-5)


def test_an_epoch_has_waited_for_the_device() -> None:
    """Waiting again adds less than 2 % to an epoch's time."""
    device = choose("cuda").device
    lone, watch = Lone(job(0), task_on(device)), Stopwatch()
    lone.epoch(watch)
    start = time.perf_counter()
    for _ in range(20):
        lone.epoch(watch)
    taken = time.perf_counter() - start
    synchronize(device)
    assert time.perf_counter() - start - taken < 0.02 * taken


def test_memory_of_earlier_trials_is_given_back() -> None:
    """What is allocated after trial 30 is what it was after trial 3, also after one that ran out of memory."""
    device = choose("cuda").device
    task = task_on(device)
    held = []
    for number in range(30):
        Lone(job(number % 5), task).epoch(Stopwatch())
        if number == 10:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 44, device=device)
        gc.collect()
        release(device)
        held.append(torch.cuda.memory_allocated(device))
    assert held[-1] <= held[3]
    assert peak_megabytes(device) > 0


def test_the_command_runs_on_the_gpu(tmp_path: Path) -> None:
    """`--device cuda` trains there, and says so in each trial."""
    command = [sys.executable, "-m", "tuner.run", "--n-trials", "20", "--device", "cuda", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert best["attributes"]["device"].startswith("cuda:0")
    assert best["attributes"]["peak_memory_mb"] > 0
