"""How much faster is a stack than its trials alone? Trial-epochs per second, one thread, interleaved.

    python scripts/bench_stack.py --lanes 64 --repeats 5
    python scripts/bench_stack.py --lanes 64 --batch-sizes 32
    python scripts/bench_stack.py --lanes 64 --leaving

The same sampled trials of the default study are trained for some epochs as lone trials on resident data, as the plain
loop with a data loader, in stacks grouped by batch size, in one mixed stack, and as the assembler chooses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Resident, prepare
from tuner.device import choose, keep_host_memory
from tuner.program import Program
from tuner.spec import explore
from tuner.stack import Stack
from tuner.study_file import load_spec
from tuner.train import Job, Lone, Task, Trainer, build


def loader_epoch(jobs: Sequence[Job], modules: Sequence[nn.Module], task: Task) -> None:
    """One epoch of each trial by the loop that PyTorch's tutorials show; the test of it by a loader, too."""
    assert isinstance(task.train, Resident)
    assert isinstance(task.validation, Resident)
    for job, module in zip(jobs, modules, strict=True):
        sgd = job.sgd
        optimizer = torch.optim.SGD(
            module.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay
        )
        module.train()
        for x, y in DataLoader(TensorDataset(*task.train.examples), batch_size=sgd.batch_size, shuffle=True):
            optimizer.zero_grad()
            job.loss(module(x), y).backward()
            optimizer.step()
        module.eval()
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(*task.validation.examples), batch_size=256):
                job.loss(module(x), y).item()


def ways_of(jobs: Sequence[Job], task: Task, loader: bool) -> dict[str, Callable[[], object]]:
    """By name, functions that train every trial for one epoch."""
    watch = Stopwatch()

    def epochs(trainers: Sequence[Trainer]) -> Callable[[], object]:
        return lambda: [trainer.epoch(watch) for trainer in trainers]

    program = Program(jobs[0], build(jobs[0], task), task)

    def stack(some: Sequence[Job]) -> Trainer:
        return Stack(some, [build(job, task) for job in some], program, task)

    def eager(trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        for trainer in trainers:
            assert isinstance(trainer, Stack)
            trainer._replay = None
        return trainers

    sizes = sorted({job.sgd.batch_size for job in jobs})
    modules = [build(job, task) for job in jobs]
    return {
        "lone": epochs([Lone(job, task) for job in jobs]),
        **({"data loader": lambda: loader_epoch(jobs, modules, task)} if loader else {}),
        "grouped": epochs([stack([job for job in jobs if job.sgd.batch_size == size]) for size in sizes]),
        "mixed": epochs([stack(jobs)]),
        **({"mixed, no graph": epochs(eager([stack(jobs)]))} if task.device.type == "cuda" else {}),
        "chosen": epochs(Assembler(task).assemble(jobs, len(jobs)).trainers),
    }


def time_leaving(jobs: Sequence[Job], task: Task, repeats: int) -> list[float]:
    """Seconds of an epoch after half of the lanes have left, over before, of stacks as the assembler makes them."""
    ratios, watch = [], Stopwatch()
    for _ in range(repeats):
        trainers = Assembler(task).assemble(jobs, len(jobs)).trainers
        seconds = []
        for gone in ((), {job.number for job in jobs if job.number // 4 % 2}):
            for trainer in trainers:
                trainer.leave([number for number in trainer.numbers if number in gone])
                trainer.epoch(watch)
            start = time.perf_counter()
            for trainer in trainers:
                trainer.epoch(watch)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    return ratios


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--leaving", action="store_true", help="time an epoch after half of the lanes have left instead"
    )
    parser.add_argument("--no-loader", action="store_true", help="leave the data loader's loop out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_host_memory()
    device = choose(args.device).device
    loaded = load_spec("digits_mlp")
    task = loaded.spec.task(prepare(loaded.spec.data(), device, loaded.origin), device)
    samples = explore(loaded).samples
    jobs = []
    for number in range(args.lanes):
        job = loaded.spec.job(number, samples[number % len(samples)])
        size = args.batch_sizes[number % len(args.batch_sizes)]
        # Rates that stay finite: the time must not depend on numbers that are none.
        jobs.append(replace(job, sgd=replace(job.sgd, batch_size=size, lr=min(job.sgd.lr, 0.1))))
    if args.leaving:
        ratios = time_leaving(jobs, task, args.repeats)
        print(
            f"{args.lanes} lanes, batch sizes {args.batch_sizes}, {device}: an epoch after half have left, over before:"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
        return
    ways = ways_of(jobs, task, not args.no_loader)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in ways.values():
        epoch()
    for _ in range(args.repeats):
        for name, epoch in ways.items():
            start = time.perf_counter()
            epoch()
            seconds[name].append(time.perf_counter() - start)
    print(f"{args.lanes} lanes, batch sizes {args.batch_sizes}, {device}, one thread, {args.repeats} repeats")
    for name, taken in seconds.items():
        ratios = [alone / own for alone, own in zip(seconds["lone"], taken, strict=True)]
        print(
            f"{name:15} {args.lanes / statistics.median(taken):8.0f} trial-epochs/s, over lone"
            f" {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
