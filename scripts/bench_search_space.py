"""What does padding bring where hardly two trials are alike? Trial-epochs per second, one thread, interleaved.

    python scripts/bench_search_space.py --trials 64 --repeats 5

Trials sampled from studies/digits_search.py (one to three layers, 4 to 128 units each) are trained for some epochs one
by one, in stacks of equal signature, and as the assembler groups them. Building and recording are timed by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

import optuna
import torch
from torch import nn

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import prepare
from tuner.device import choose, keep_host_memory
from tuner.program import Program
from tuner.signature import signature
from tuner.spec import StudySpec, quiet_optuna
from tuner.stack import Stack
from tuner.study_file import load_spec
from tuner.train import Job, Lone, Task, Trainer, build


def sampled(spec: StudySpec, count: int, seed: int) -> list[Job]:
    """Jobs of this many trials; their rates stay finite: the time must not depend on numbers that are none."""
    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    jobs = [spec.job(number, spec.space(study.ask())) for number in range(count)]
    return [replace(job, sgd=replace(job.sgd, lr=min(job.sgd.lr, 0.1))) for job in jobs]


def lone(jobs: Sequence[Job], task: Task) -> Sequence[Trainer]:
    """Each by itself."""
    return [Lone(job, task) for job in jobs]


def exact(jobs: Sequence[Job], task: Task) -> Sequence[Trainer]:
    """Stacks of trials of one signature and batch size; those without a like are alone."""
    kinds: dict[Hashable, list[tuple[Job, nn.Module]]] = {}
    for job in jobs:
        module = build(job, task)
        kinds.setdefault((signature(module, job.loss_key), job.sgd.batch_size), []).append((job, module))
    trainers: list[Trainer] = []
    for members in kinds.values():
        if len(members) == 1:
            trainers.append(Lone(members[0][0], task, members[0][1]))
        else:
            program = Program(*members[0], task)
            trainers.append(Stack([job for job, _ in members], [module for _, module in members], program, task))
    return trainers


def assembled(jobs: Sequence[Job], task: Task) -> Sequence[Trainer]:
    """As a search trains them, all asked for at once."""
    made = Assembler(task).assemble(jobs, len(jobs))
    for notice in made.notices:
        print(notice)
    return made.trainers


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="digits_search")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_host_memory()
    device = choose(args.device).device
    loaded = load_spec(args.study)
    task = loaded.spec.task(prepare(loaded.spec.data(), device, loaded.origin), device)
    jobs = sampled(loaded.spec, args.trials, args.seed)
    watch = Stopwatch()
    ways: dict[str, Sequence[Trainer]] = {}
    built, seconds = {}, {}
    lone(jobs[:1], task)[0].epoch(watch)
    for way in (lone, exact, assembled):
        start = time.perf_counter()
        ways[way.__name__] = way(jobs, task)
        built[way.__name__] = time.perf_counter() - start
        seconds[way.__name__] = [float("nan")] * args.repeats
    for repeat in range(-1, args.repeats):
        for name, trainers in ways.items():
            start = time.perf_counter()
            for trainer in trainers:
                trainer.epoch(watch)
            if repeat >= 0:
                seconds[name][repeat] = time.perf_counter() - start
    print(f"{args.trials} trials of {args.study}, seed {args.seed}, {device}, one thread, {args.repeats} repeats")
    for name, taken in seconds.items():
        ratios = [alone / own for alone, own in zip(seconds["lone"], taken, strict=True)]
        whole = {way: built[way] + task.epochs * statistics.median(seconds[way]) for way in ways}
        print(
            f"{name:10} {len(ways[name]):3} trainers, {args.trials / statistics.median(taken):6.0f} trial-epochs/s,"
            f" over lone {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f});"
            f" built in {built[name]:5.2f} s, {task.epochs} epochs with that {whole['lone'] / whole[name]:5.2f}"
        )


if __name__ == "__main__":
    main()
