"""Whether stacks pay here: the study's own sampled trials, trained for a moment alone and together, and timed.

What comes out is remembered for this machine, study and command line, so that a second run of it starts at once.
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
from tuner.device import cores, describe, is_lost
from tuner.plan import MANY_TRIALS, THREAD_FLOPS, Scope, Timing
from tuner.train import Job, Task, Trainer

EXAMPLES = 512
"""Trials are timed on this many examples at most: two steps of the largest usual batch."""

LONE_JOBS = 16
"""So many trials are timed alone: where architectures vary, a few say little about the others."""

SECONDS = 0.1
"""Each way is timed for this long, after it has run once."""

LONGEST_WAY = 1.0
"""A way is not timed to its end if it takes longer than this."""

MEASURED = 2
"""Counted up when stacks change so much that what was measured says nothing any more."""

SHARE = 0.05
"""Measuring stops when it has taken this share of what the goal would take by lone trials."""

MOST_SECONDS = 5.0
"""And at the latest after this time."""


def time_ways(task: Task, jobs: Sequence[Job], scope: Scope, assembler: Assembler) -> list[Timing]:
    """Time the ways that `scope` allows: lone trials, stacks of each width, more threads.

    More threads are tried with lone trials and with the best width. A way that fails is left out; `assembler` gets to
    know the programs that are recorded. The time that all this may take follows from how long lone trials would take
    for the goal.
    """
    bench = _Bench(task, jobs, assembler)
    fewest, most = min(scope.threads), max(scope.threads)
    try:
        start = time.perf_counter()
        lone = bench.time(1, fewest)
        allowed = MOST_SECONDS
        if lone is not None:
            goal = (scope.goal or MANY_TRIALS) * task.epochs * lone.seconds
            allowed = min(allowed, SHARE * goal)
        widths = [width for width in scope.lanes if 1 < width <= max(scope.widest(1), min(scope.lanes))]
        ways = [(width, fewest) for width in sorted(widths, reverse=True)]
        if 1 in scope.lanes and scope.step_flops > THREAD_FLOPS:
            ways.append((1, most))
        for lanes, threads in ways:
            if time.perf_counter() - start > allowed:
                return bench.timings
            bench.time(lanes, threads)
        best = min((t for t in bench.timings if t.lanes in (1, *widths)), key=lambda t: t.seconds, default=None)
        if best is not None and best.lanes * scope.step_flops > THREAD_FLOPS:
            bench.time(best.lanes, most)
        return bench.timings
    finally:
        torch.set_num_threads(fewest)


@dataclass
class _Bench:
    """Times ways on the first examples of a task, each once."""

    task: Task
    jobs: Sequence[Job]
    assembler: Assembler

    def __post_init__(self) -> None:
        self.timings: list[Timing] = []
        self._small = _head(self.task)
        # From seconds for these few examples to seconds for an epoch.
        self._scale = self.task.train.size / self._small.train.size
        self._assembler = self.assembler.on(self._small)

    def time(self, lanes: int, threads: int) -> Timing | None:
        for timing in self.timings:
            if (timing.lanes, timing.threads) == (lanes, threads):
                return timing
        torch.set_num_threads(threads)
        count = lanes if lanes > 1 else min(LONE_JOBS, len(self.jobs))
        some = [replace(self.jobs[i % len(self.jobs)], number=i) for i in range(count)]
        try:
            made = self._assembler.assemble(some, lanes)
            stacked = sum(len(trainer.numbers) for trainer in made.trainers if len(trainer.numbers) > 1)
            if made.errors or (lanes > 1 and stacked <= lanes // 2):
                return None
            timing = Timing(lanes, threads, _seconds(made.trainers) * self._scale, stacked)
        except Exception as error:
            if is_lost(error):
                raise
            return None  # Too wide for this device's memory, or a trial that fails: the search will say so.
        self.timings.append(timing)
        return timing


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


def machine(device: torch.device) -> str:
    """What a timing depends on, besides the study."""
    return f"{platform.node()} {describe(device)} {cores()} cores torch {torch.__version__} tuner {MEASURED}"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tuner"


def _head(task: Task) -> Task:
    def first(source: object) -> Resident:
        examples = next(iter(source.batches(EXAMPLES)))  # type: ignore[attr-defined]
        return Resident(tree_map(torch.clone, examples), task.device)

    return replace(task, train=first(task.train), validation=first(task.validation))


def _seconds(trainers: Sequence[Trainer]) -> float:
    """Seconds per trial and epoch: the quickest of some rounds of all trainers, or what was done until it took long."""
    watch = Stopwatch()
    begin = time.perf_counter()
    best, rounds = float("inf"), 0
    while rounds < 2 or time.perf_counter() - begin < SECONDS:
        start, lanes = time.perf_counter(), 0
        for trainer in trainers:
            trainer.epoch(watch)
            lanes += len(trainer.numbers)
            now = time.perf_counter()
            if now - begin > LONGEST_WAY:
                return min(best, (now - start) / lanes)
        # The first round is slower: memory is taken, kernels are chosen.
        best = min(best, (now - start) / lanes) if rounds else best
        rounds += 1
    return best
