"""One trial's training, the ordinary way: plain autograd, SGD, one network. The reference for every stack.

A trainer trains lanes by epochs and says what came out; it knows nothing of Optuna, and what the numbers mean is
decided above. `Lone` is a stack of one lane: the contract of both is `Trainer`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as sgd_step
from torch.utils._pytree import tree_flatten, tree_unflatten

from tuner.clock import Stopwatch
from tuner.data import Batch, Source, epoch_order, epoch_seed
from tuner.device import autocast, synchronize, widest
from tuner.dropout import with_tensor_rates

EVALUATION_BATCH = 1024
"""Examples per step of an evaluation: it changes memory and speed, and results by rounding only."""

SCHEDULES = ("constant", "cosine", "step", "one-cycle")

ONE_CYCLE_START, ONE_CYCLE_END, ONE_CYCLE_RISE = 1 / 25, 1 / 25e4, 0.3
"""The one-cycle policy's factors and rising share, as in ``torch.optim.lr_scheduler.OneCycleLR``."""


@dataclass(frozen=True)
class SGD:
    """The optimizer's hyperparameters, with the meaning of ``torch.optim.SGD``, and the learning rate's schedule.

    `schedule` is a name from `SCHEDULES`; `warmup_epochs` raises the rate linearly from zero before it; ``step``
    multiplies the rate by `step_gamma` every `step_epochs`.
    """

    lr: float
    batch_size: int
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    schedule: str = "constant"
    warmup_epochs: float = 0.0
    step_epochs: float = 10.0
    step_gamma: float = 0.1

    def rate(self, epoch: float, epochs: int) -> float:
        """The learning rate when `epoch` (fractional, from the start) of `epochs` have passed."""
        if epoch < self.warmup_epochs:
            return self.lr * epoch / self.warmup_epochs
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "step":
            return self.lr * self.step_gamma ** int((epoch - self.warmup_epochs) / self.step_epochs)
        progress = (epoch - self.warmup_epochs) / max(epochs - self.warmup_epochs, 1e-9)
        if self.schedule == "cosine":
            return self.lr * _cosine(1.0, 0.0, progress)
        if progress < ONE_CYCLE_RISE:
            return self.lr * _cosine(ONE_CYCLE_START, 1.0, progress / ONE_CYCLE_RISE)
        return self.lr * _cosine(1.0, ONE_CYCLE_END, (progress - ONE_CYCLE_RISE) / (1 - ONE_CYCLE_RISE))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean over the examples, a tensor of no dimensions."""

Metric = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean over the examples, a number; evaluated on the validation split every epoch."""


@dataclass(frozen=True)
class Task:
    """What all trials of a run share: the data, where they are, and what is measured on them."""

    train: Source
    validation: Source
    metrics: Mapping[str, Metric]
    epochs: int
    device: torch.device
    precision: str = "float32"

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward pass and its loss are computed in."""
        return autocast(self.device, self.precision)


@dataclass(frozen=True)
class Job:
    """One trial to train. `model` builds the network on the CPU, after `weights_seed` (None: `seed`) has been set.

    `seed` is for all else that is random. `loss_key` is equal for trials whose `loss` does the same.
    """

    number: int
    model: Callable[[], nn.Module]
    loss: Loss
    sgd: SGD
    seed: int
    loss_key: Hashable = None
    weights_seed: int | None = None


@dataclass(frozen=True)
class EpochResult:
    """What one lane did in one epoch (0-based).

    `train_loss` is the mean over the epoch's examples as they were seen; `validation` holds ``loss`` and the metrics;
    `samples` counts the examples trained on. The seconds are the wall time of the whole trainer, the device waited for.
    """

    number: int
    epoch: int
    train_loss: float
    validation: Mapping[str, float]
    samples: int
    train_seconds: float
    validate_seconds: float


def seed_generators(seed: int) -> None:
    """Seed PyTorch's generators, Python's and NumPy's: a model or a data set may draw from any of them."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # That notes the caller's stack for each kind of device that might come yet: 0.4 ms, in lists that only grow.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def build(job: Job, task: Task) -> nn.Module:
    """The trial's network with its initial weights, on the device."""
    seed_generators(job.seed if job.weights_seed is None else job.weights_seed)
    return with_tensor_rates(job.model()).to(task.device)


class Trainer(Protocol):
    """K lanes that are trained together. Every call leaves the device idle: its work has been waited for."""

    def epoch(self, watch: Stopwatch) -> Sequence[EpochResult]:
        """Train each lane for its next epoch and evaluate it; laps ``train`` and ``validate``."""

    def weights(self, number: int) -> dict[str, Tensor]:
        """A copy of a lane's state dictionary, on the CPU."""

    def leave(self, numbers: Sequence[int]) -> None:
        """Give up the lanes of these trials."""

    @property
    def numbers(self) -> Sequence[int]:
        """The trials in the lanes."""


class Lone:
    """One network, trained by itself.

    With `micro_batch` no more than so many examples are trained or evaluated at a time: the gradient of a batch is
    added up from its parts, which must be the same (`tuner.microbatch`).
    """

    def __init__(self, job: Job, task: Task, module: nn.Module | None = None, micro_batch: int | None = None) -> None:
        self._module = build(job, task) if module is None else module
        self._job = job
        self._task = task
        self.micro_batch = micro_batch
        self._epoch = 0
        self._gone = False
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._momenta: list[Tensor | None] = [None] * len(self._trained)

    @property
    def numbers(self) -> Sequence[int]:
        return () if self._gone else (self._job.number,)

    def epoch(self, watch: Stopwatch) -> Sequence[EpochResult]:
        epoch, task = self._epoch, self._task
        seed_generators(epoch_seed(self._job.seed, epoch))
        train_loss = self._train(epoch)
        synchronize(task.device)
        train_seconds = watch.lap("train")
        at_once = min(EVALUATION_BATCH, self.micro_batch or EVALUATION_BATCH)
        validation = evaluate(self._module, self._job.loss, task, task.validation, at_once)
        seconds = (train_seconds, watch.lap("validate"))
        self._epoch += 1
        return (EpochResult(self._job.number, epoch, float(train_loss), validation, task.train.size, *seconds),)

    def weights(self, number: int) -> dict[str, Tensor]:
        return {name: value.detach().to("cpu", copy=True) for name, value in self._module.state_dict().items()}

    def leave(self, numbers: Sequence[int]) -> None:
        self._gone = self._gone or self._job.number in numbers

    def _train(self, epoch: int) -> Tensor:
        """One pass over the training data; returns the mean loss without waiting for the device."""
        sgd, train = self._job.sgd, self._task.train
        self._module.train()
        steps = -(-train.size // sgd.batch_size)
        losses, sizes = [], []
        batches = train.batches(sgd.batch_size, epoch_order(train.size, self._job.seed, epoch))
        for step, batch in enumerate(batches):
            losses.append(self._backward(batch))
            sizes.append(examples_in(batch))
            self._update(sgd.rate(epoch + step / steps, self._task.epochs))
        return weighted_mean(losses, sizes)

    def _backward(self, batch: Batch) -> Tensor:
        """Leave the gradient of a batch's mean loss with the parameters; returns the loss."""
        examples = examples_in(batch)
        leaves, structure = tree_flatten(batch)
        at_once = self.micro_batch or examples
        parts = [leaves] if at_once >= examples else zip(*(leaf.split(at_once) for leaf in leaves), strict=True)
        losses = []
        for part in parts:
            inputs, target = tree_unflatten(list(part), structure)
            with self._task.autocast():
                loss = self._job.loss(call(self._module, inputs), target)
            if at_once < examples:
                loss = loss * (len(part[0]) / examples)
            loss.backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """A step of SGD on the gradients, which are gone afterwards.

        PyTorch's own function behind ``torch.optim.SGD``: the class would import the compiler, 2 s at the start.
        """
        sgd = self._job.sgd
        used = [i for i, p in enumerate(self._trained) if p.grad is not None]
        momenta = [self._momenta[i] for i in used]
        sgd_step(
            [self._trained[i] for i in used],
            [self._trained[i].grad for i in used],  # type: ignore[misc]
            momenta,
            foreach=self._task.device.type != "cpu",
            lr=lr,
            momentum=sgd.momentum,
            dampening=sgd.dampening,
            weight_decay=sgd.weight_decay,
            nesterov=sgd.nesterov,
            maximize=False,
        )
        for i, momentum in zip(used, momenta, strict=True):
            self._momenta[i] = momentum
            self._trained[i].grad = None


def evaluate(
    module: nn.Module, loss: Loss, task: Task, source: Source, at_once: int = EVALUATION_BATCH
) -> dict[str, float]:
    """The loss and the task's metrics of `module` over all of `source`; waits for the device once, at the end."""
    module.eval()
    measures: dict[str, Callable[[Any, Any], Tensor]] = {"loss": loss, **task.metrics}
    device = task.device
    rows, sizes = [], []
    with torch.inference_mode(), task.autocast():
        for inputs, target in source.batches(at_once):
            output = call(module, inputs)
            values = [f(output, target) for f in measures.values()]
            rows.append(
                torch.stack([torch.as_tensor(v, device=device, dtype=widest(device)).reshape(()) for v in values])
            )
            sizes.append(examples_in((inputs, target)))
    return dict(zip(measures, weighted_mean(rows, sizes).tolist(), strict=True))


def call(module: nn.Module, inputs: Any) -> Any:
    """The module on a batch: a dictionary of inputs by keyword, a tuple or list by position."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def examples_in(batch: Batch) -> int:
    """How many examples a batch holds."""
    return len(torch.utils._pytree.tree_leaves(batch)[0])


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The mean of per-batch means over examples, in the widest precision; a tensor on their device."""
    stacked = torch.stack(list(values))
    stacked = stacked.to(widest(stacked.device))
    share = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device) / sum(sizes)
    mean: Tensor = torch.tensordot(share, stacked, dims=1)
    return mean
