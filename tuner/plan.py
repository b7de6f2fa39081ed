"""A plan says how a run is executed: device, workers, threads, lanes. It changes what is learned by rounding only.

The number of threads follows from the work of one training step, counted and not timed, and the number of lanes is
measured once and remembered (`tuner.measure`): the same study on the same machine gets the same plan again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tuner.device import cores, describe, synchronize
from tuner.train import Job, Task, build, call

THREAD_FLOPS = 40e6
"""Floating-point operations of a training step from which more than one CPU thread is used. An estimate: two threads
lose on the default study (1 to 2 MFLOP a step); where they begin to win has not been measured."""

MOST_LANES = 64
"""Wider stacks gained nothing more on a CPU."""

GENERATIONS = 5
"""A search asks for at most this share of its trials at once: what is asked for together cannot learn from each other.
An estimate; what it costs at 50 trials is in docs/measurements.md."""


@dataclass(frozen=True)
class Plan:
    """How a run is executed; `why` is said on the first lines."""

    device: torch.device
    workers: int = 1
    threads: int = 1
    lanes: int = 1
    why: str = ""

    @property
    def text(self) -> str:
        """The plan in one line."""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        lanes = f"{self.lanes} lane{'s' if self.lanes > 1 else ''}{' each' if self.workers > 1 else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}{' each' if self.workers > 1 else ''}"
        return f"{describe(self.device)}, {workers}, {lanes}, {threads} ({self.why})"


def choose_threads(device: torch.device, workers: int, step_flops: float) -> tuple[int, str]:
    """CPU threads for each worker with training steps of `step_flops` operations, and why."""
    available = max(1, cores() // workers)
    if device.type != "cpu":
        return 1, "the device works, the CPU only feeds it"
    if available == 1:
        return 1, f"{cores()} core{'s' if cores() > 1 else ''} for {workers} worker{'s' if workers > 1 else ''}"
    if step_flops < THREAD_FLOPS:
        return 1, f"steps of {step_flops / 1e6:.0f} MFLOP are too small for more"
    return available, f"steps of {step_flops / 1e6:.0f} MFLOP"


def widest_search(goal: int | None, workers: int, generations: int = GENERATIONS) -> int:
    """The most lanes that leave the sampler enough generations to learn from, with `goal` trials for all workers."""
    return MOST_LANES if goal is None else max(1, min(MOST_LANES, goal // (generations * workers)))


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
    loss = job.loss(call(module, inputs), target)
    for hook in hooks:
        hook.remove()
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss() must return the mean over the batch, a tensor without dimensions; found {found}")
    loss.backward()
    module.eval()
    with torch.inference_mode():
        inputs, target = next(iter(task.validation.batches(min(32, task.validation.size))))
        output = call(module, inputs)
        job.loss(output, target)
        for name, metric in task.metrics.items():
            value = torch.as_tensor(metric(output, target))
            if value.numel() != 1:
                raise TypeError(f"metric {name!r} must return one number; found a tensor of shape {tuple(value.shape)}")
    synchronize(task.device)
    return 6.0 * products
