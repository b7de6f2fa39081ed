"""A plan says how a run is executed: device, workers, threads, lanes. It changes what is learned by rounding only.

What the plan follows from is measured once and remembered (`tuner.measure`): the same command on the same machine gets
the same timings again. Workers cost a start each, so how much there is to do is a part of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tuner.device import describe, synchronize
from tuner.train import Job, Task, build, call

WIDTHS = (4, 8, 16, 32, 64)
"""Stacks that are timed; wider ones gained nothing more on a CPU."""

DEVICE_WIDTHS = (128, 256)
"""Those that are timed on an accelerator besides."""

FIRST_LANES = 6
"""With a sampler that learns, so many trials may be asked for at once however few there are to come, and one more for
each `GENERATIONS` of them: what is asked for together cannot learn from each other. Measured: docs/measurements.md."""

GENERATIONS = 16

GAIN = 1.1
"""A stack must be this much faster than lone trials, and more workers than one, to be worth what can go wrong."""

THREADS_GAIN = 1.3
"""The same for more than one thread: where another program takes a core, threads that wait for each other stand still.
Measured: docs/measurements.md."""

THREAD_FLOPS = 10e6
"""Floating-point operations of a step, of all lanes together, from which more than one thread is tried. An estimate."""

WORKER_SHARE = 0.85
"""Each of several workers on as many cores is this fast, against one that has the machine for itself. Measured:
docs/measurements.md."""

MANY_TRIALS = 1000
"""So many are assumed where no number was given."""


@dataclass(frozen=True)
class Plan:
    """How a run is executed; `why` is said on the first lines."""

    device: torch.device
    workers: int = 1
    threads: int = 1
    lanes: int = 1
    precision: str = "float32"
    why: str = ""

    @property
    def text(self) -> str:
        """The plan in one line."""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        lanes = f"{self.lanes} lane{'s' if self.lanes > 1 else ''}{' each' if self.workers > 1 else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}{' each' if self.workers > 1 else ''}"
        precision = f", {self.precision}" if self.precision != "float32" else ""
        return f"{describe(self.device)}, {workers}, {lanes}, {threads}{precision} ({self.why})"


@dataclass(frozen=True)
class Timing:
    """One way to train: `seconds` of one worker per trial and epoch, with so many lanes and CPU threads.

    `stacked` is how many of the lanes were in stacks.
    """

    lanes: int
    threads: int
    seconds: float
    stacked: int = 0


@dataclass(frozen=True)
class Scope:
    """What a plan may choose from, and how much there is to do.

    `goal` is the number of trials (None: nobody knows), `epochs` of each; `workers`, `threads` and `lanes` are those
    that are allowed, and `learning` says whether the sampler learns from earlier trials. `start` is how long a worker
    takes to start, in seconds, and `step_flops` the floating-point operations of a lone trial's step.
    """

    goal: int | None
    epochs: int
    workers: Sequence[int]
    threads: Sequence[int]
    lanes: Sequence[int]
    learning: bool
    start: float
    step_flops: float

    def widest(self, workers: int) -> int:
        """The most lanes of each of some workers that leave a sampler that learns enough generations."""
        if self.goal is None:
            return max(self.lanes)
        at_once = min(self.goal, FIRST_LANES + self.goal // GENERATIONS) if self.learning else self.goal
        return max(1, min(max(self.lanes), at_once // workers))


@dataclass(frozen=True)
class Choice:
    """A plan's numbers, and the seconds that the whole goal is expected to take with them, pruning left aside."""

    workers: int
    threads: int
    lanes: int
    seconds: float


def choose(timings: Sequence[Timing], scope: Scope) -> Choice:
    """The quickest of the ways that were timed; a more complicated one must be quicker by some factor."""

    def cost(way: Choice) -> float:
        several = [(way.workers > min(scope.workers), GAIN), (way.lanes > 1, GAIN), (way.threads > 1, THREADS_GAIN)]
        return way.seconds * math.prod(factor for is_so, factor in several if is_so)

    nothing_timed = Choice(min(scope.workers), min(scope.threads), min(scope.lanes), math.inf)
    return min(choices(timings, scope), key=cost, default=nothing_timed)


def choices(timings: Sequence[Timing], scope: Scope) -> Iterator[Choice]:
    """All ways to do the goal, as far as they were timed."""
    work = (scope.goal or MANY_TRIALS) * scope.epochs
    widths = sorted({timing.lanes for timing in timings if timing.lanes > 1})
    for workers in scope.workers:
        widest = scope.widest(workers)
        for timing in timings:
            lanes, threads = timing.lanes, timing.threads
            if (
                lanes not in scope.lanes
                or threads not in scope.threads
                or (workers > 1 and threads > min(scope.threads))
            ):
                continue
            if len(scope.lanes) > 1:
                if lanes > widest:
                    continue
                # A stack wider than the one that was timed is no slower.
                wider = [width for width in widths if lanes < width <= widest]
                lanes = widest if lanes > 1 and not wider else lanes
            seconds = work * timing.seconds / (workers * WORKER_SHARE if workers > 1 else 1.0)
            yield Choice(workers, threads, lanes, seconds + (scope.start if workers > 1 else 0.0))


def try_step(job: Job, task: Task) -> float:
    """Run one training step and one evaluation on a few examples; raise what they raise.

    Returns the floating-point operations of a training step with the job's whole batch, roughly: each weight of a layer
    is multiplied and added once for every position of its output, and twice more backwards.
    """
    module = build(job, task).train()
    inputs, target = next(iter(task.train.batches(min(job.sgd.batch_size, task.train.size))))
    products = 0

    def count(layer: nn.Module, _: object, output: object) -> None:
        nonlocal products
        weights = [p for p in layer.parameters(recurse=False) if p.dim() > 1]
        if isinstance(output, Tensor):
            products += sum(p.numel() * (output.numel() // p.shape[0]) for p in weights)

    hooks = [layer.register_forward_hook(count) for layer in module.modules()]
    with task.autocast():
        loss = job.loss(call(module, inputs), target)
    for hook in hooks:
        hook.remove()
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss() must return the mean over the batch, a tensor without dimensions; found {found}")
    loss.backward()
    module.eval()
    with torch.inference_mode(), task.autocast():
        inputs, target = next(iter(task.validation.batches(min(32, task.validation.size))))
        output = call(module, inputs)
        job.loss(output, target)
        for name, metric in task.metrics.items():
            value = torch.as_tensor(metric(output, target))
            if value.numel() != 1:
                raise TypeError(f"metric {name!r} must return one number; found a tensor of shape {tuple(value.shape)}")
    synchronize(task.device)
    return 6.0 * products
