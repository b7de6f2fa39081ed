"""Whether stacks pay here: the study's own sampled trials, trained for a moment alone and together, and timed.

What comes out is remembered for this machine and study, so that a second run starts at once and takes the same plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Resident
from tuner.device import cores, describe
from tuner.train import Job, Lone, Task, Trainer

EXAMPLES = 512
"""Trials are timed on this many examples at most: two steps of the largest usual batch."""

LONE_JOBS = 16
"""So many trials are timed alone: where architectures vary, a few say little about the others."""

SECONDS = 0.2
"""Each way is timed for this long, after it has run once."""

GAIN = 1.1
"""A stack must be this much faster than lone trials to be worth what can go wrong."""


@dataclass(frozen=True)
class Timing:
    """One way to train the sampled trials: seconds per trial and pass over the timed examples."""

    lanes: int
    seconds: float
    stacked: int


def time_lanes(task: Task, jobs: Sequence[Job], widths: Sequence[int]) -> list[Timing]:
    """Time lone trials, then stacks of each width; a way that fails is left out."""
    small = _head(task)
    timings = [Timing(1, _seconds([Lone(job, small) for job in jobs[:LONE_JOBS]]) / len(jobs[:LONE_JOBS]), 0)]
    assembler = Assembler(small)
    for width in widths:
        some = [replace(jobs[i % len(jobs)], number=i) for i in range(width)]
        made = assembler.assemble(some, width)
        if made.errors:
            continue
        stacked = sum(len(t.numbers) for t in made.trainers if len(t.numbers) > 1)
        if stacked > width // 2:
            timings.append(Timing(width, _seconds(made.trainers) / width, stacked))
    return timings


def best_lanes(timings: Sequence[Timing]) -> int:
    """The number of lanes that trains a trial in the least time, if it gains enough over lone trials."""
    alone = timings[0].seconds
    fastest = min(timings, key=lambda timing: timing.seconds)
    return fastest.lanes if fastest.seconds * GAIN < alone else 1


def remembered(key: str, measure: Callable[[], Sequence[Timing]]) -> tuple[list[Timing], bool]:
    """The timings that were made here for `key` before, or those made now; and whether they are from before."""
    path = _cache_folder() / f"plan-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return [Timing(**row) for row in json.loads(path.read_text(encoding="utf-8"))], True
    except (OSError, ValueError, TypeError):
        timings = list(measure())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as stream:
            json.dump([vars(timing) for timing in timings], stream)
        os.replace(stream.name, path)
    except OSError:
        pass  # Measured again the next time.
    return timings, False


def machine(device: torch.device, threads: int) -> str:
    """What a timing depends on, besides the study."""
    return f"{platform.node()} {describe(device)} {cores()} cores {threads} threads torch {torch.__version__}"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tuner"


def _head(task: Task) -> Task:
    def first(source: object) -> Resident:
        examples = next(iter(source.batches(EXAMPLES)))  # type: ignore[attr-defined]
        return Resident(tree_map(torch.clone, examples), task.device)

    return replace(task, train=first(task.train), validation=first(task.validation))


def _seconds(trainers: Sequence[Trainer]) -> float:
    """The quickest of some rounds of all trainers' epochs."""
    best = float("inf")
    watch = Stopwatch()
    for trainer in trainers:
        trainer.epoch(watch)
    end = time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        for trainer in trainers:
            trainer.epoch(watch)
        best = min(best, time.perf_counter() - start)
    return best
