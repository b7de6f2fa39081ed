"""K trials of one signature and one age, trained together: each lane gives what its trial would have given alone.

All lanes read the same stream of micro-batches. A lane whose batch is m micro-batches adds up their gradients and takes
its step at every m-th, and at the epoch's last one, by the mean over the examples that it really saw. The lanes are
sorted by m, so that those that are due are always the first ones.
Legend of names: K lanes, S steps of an epoch, M measures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tuner.clock import Stopwatch
from tuner.data import epoch_order, epoch_seed
from tuner.device import synchronize
from tuner.padding import part_of
from tuner.program import Program
from tuner.train import EVALUATION_BATCH, EpochResult, Job, Task, seed_generators, weighted_mean


class Stack:
    """The lanes of some trials. Their batch sizes are one, or each a multiple of the next smaller one."""

    def __init__(self, jobs: Sequence[Job], modules: Sequence[nn.Module], program: Program, task: Task) -> None:
        order = sorted(range(len(jobs)), key=lambda lane: jobs[lane].sgd.batch_size)
        self._jobs = [jobs[lane] for lane in order]
        self._program = program
        self._task = task
        self._epoch = 0
        self._masks = program.masks([modules[lane] for lane in order])
        # Lanes of one shape share a network to take their state dictionaries from.
        self._networks = {job.number: modules[lane if self._masks else 0] for lane, job in enumerate(jobs)}
        tensors = [program.tensors(modules[lane]) for lane in order]
        self._trained = [torch.stack(lanes) for lanes in zip(*(t for t, _ in tensors), strict=True)]
        self._fixed = [torch.stack(lanes) for lanes in zip(*(f for _, f in tensors), strict=True)]
        self._momenta = [torch.zeros_like(t) for t in self._trained]
        # After the tensors have been copied: the comparison uses the modules up.
        program.check(modules, [job.loss for job in jobs], [job.seed for job in jobs])
        self._settle()

    @property
    def numbers(self) -> Sequence[int]:
        return [job.number for job in self._jobs]

    def epoch(self, watch: Stopwatch) -> Sequence[EpochResult]:
        seed_generators(epoch_seed(self._jobs[0].seed, self._epoch))
        train_K = self._train()
        synchronize(self._task.device)
        train_seconds = watch.lap("train")
        measured = self._evaluate().tolist()
        losses = train_K.tolist()
        validate_seconds = watch.lap("validate")
        names = ("loss", *self._task.metrics)
        results = [
            EpochResult(
                number=job.number,
                epoch=self._epoch,
                train_loss=losses[lane],
                validation=dict(zip(names, measured[lane], strict=True)),
                samples=self._task.train.size,
                train_seconds=train_seconds,
                validate_seconds=validate_seconds,
            )
            for lane, job in enumerate(self._jobs)
        ]
        self._epoch += 1
        return results

    def weights(self, number: int) -> dict[str, Tensor]:
        lane = self.numbers.index(number)
        rows = dict(zip(self._program.trained, self._trained, strict=True))
        rows |= dict(zip(self._program.fixed, self._fixed, strict=True))
        network = self._networks[number]
        with torch.no_grad():
            for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
                tensor.copy_(part_of(rows[name][lane], tensor.shape))
        return {name: t.detach().to("cpu", copy=True) for name, t in network.state_dict().items()}

    def leave(self, numbers: Sequence[int]) -> None:
        kept = [lane for lane, job in enumerate(self._jobs) if job.number not in numbers]
        if len(kept) == len(self._jobs):
            return
        self._jobs = [self._jobs[lane] for lane in kept]
        rows = torch.tensor(kept, dtype=torch.long, device=self._task.device)
        self._trained, self._fixed, self._momenta = (
            [tensor.index_select(0, rows) for tensor in tensors]
            for tensors in (self._trained, self._fixed, self._momenta)
        )
        if self._masks:
            self._masks = [mask.index_select(0, rows) for mask in self._masks]
        self._networks = {job.number: self._networks[job.number] for job in self._jobs}
        if self._jobs:
            self._settle()

    def _settle(self) -> None:
        """Everything that follows from which lanes there are."""
        settings = [job.sgd for job in self._jobs]
        self._micro = settings[0].batch_size
        self._every = [sgd.batch_size // self._micro for sgd in settings]
        self._whole = self._every.count(1)
        self._sums = [torch.zeros_like(t[self._whole :]) for t in self._trained]
        self._momentum_K = self._column([sgd.momentum for sgd in settings])
        self._decay_K = self._column([sgd.weight_decay for sgd in settings])
        self._nesterov_K = self._column([float(sgd.nesterov) for sgd in settings])
        # Views that every step takes again.
        self._slices: dict[tuple[int, int], tuple[list[Tensor], ...]] = {}
        self._steps: dict[tuple[int, int], list[Tensor]] = {}
        self._constant = all(sgd.schedule == "constant" and not sgd.warmup_epochs for sgd in settings)
        self._plain = not any(sgd.nesterov or (sgd.dampening and sgd.momentum) for sgd in settings)

    def _train(self) -> Tensor:
        """One epoch; returns the mean loss of each lane, without waiting for the device."""
        task, program, whole = self._task, self._program, self._whole
        order_N = epoch_order(task.train.size, self._jobs[0].seed, self._epoch)
        steps = -(-task.train.size // self._micro)
        rates_SK = self._rates(steps)
        losses, sizes = [], []
        seen = [0] * len(self._jobs)
        for step, batch in enumerate(task.train.batches(self._micro, order_N)):
            leaves = tree_leaves(batch)
            *gradients, losses_K = program.train.run(*self._trained, *self._fixed, *leaves)
            if self._masks:
                gradients = list(torch._foreach_mul(gradients, self._masks))
            losses.append(losses_K)
            sizes.append(len(leaves[0]))
            if whole == len(self._jobs):
                self._update(0, whole, gradients, rates_SK[step], step)
                continue
            if whole:
                self._update(0, whole, [g[:whole] for g in gradients], rates_SK[step], step)
            self._accumulate(gradients, sizes[-1], seen)
            due = sum(step == steps - 1 or (step + 1) % every == 0 for every in self._every)
            if due > whole:
                self._update(whole, due, self._take_means(due, seen), rates_SK[step], step)
        return weighted_mean(losses, sizes)

    def _accumulate(self, gradients: Sequence[Tensor], examples: int, seen: list[int]) -> None:
        """Add a micro-batch to the lanes whose batch is larger: gradients of means become sums over examples."""
        torch._foreach_add_(self._sums, [g[self._whole :] for g in gradients], alpha=examples)
        for lane in range(self._whole, len(seen)):
            seen[lane] += examples

    def _take_means(self, due: int, seen: list[int]) -> list[Tensor]:
        """The mean gradients of the lanes from the first larger one to `due`, whose sums start anew."""
        rows = due - self._whole
        shares_K = self._column([1.0 / seen[lane] for lane in range(self._whole, due)])
        means = [total[:rows] * _beside(shares_K, total) for total in self._sums]
        for total in self._sums:
            total[:rows].zero_()
        seen[self._whole : due] = [0] * rows
        return means

    def _update(self, start: int, stop: int, gradients: Sequence[Tensor], rate_K: Tensor, step: int) -> None:
        """A step of SGD for the lanes from `start` to `stop`, as ``torch.optim.SGD`` takes it for each."""
        if (start, stop) not in self._slices:
            trained, momenta = ([t[start:stop] for t in tensors] for tensors in (self._trained, self._momenta))
            settings = (self._momentum_K[start:stop], self._decay_K[start:stop])
            self._slices[start, stop] = (trained, momenta, *([_beside(c, t) for t in trained] for c in settings))
        trained, momenta, momentum, decay = self._slices[start, stop]
        if not self._constant or (start, stop) not in self._steps:
            less_K = -rate_K[start:stop]
            self._steps[start, stop] = [_beside(less_K, t) for t in trained]
        rate = self._steps[start, stop]
        if not self._plain:
            self._update_fully(start, stop, gradients, (trained, momenta, momentum, decay, rate), step)
            return
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, list(gradients))
        torch._foreach_addcmul_(momenta, trained, decay)
        torch._foreach_addcmul_(trained, momenta, rate)

    def _update_fully(
        self, start: int, stop: int, gradients: Sequence[Tensor], tensors: tuple[list[Tensor], ...], step: int
    ) -> None:
        """The same with dampening, which the first step of a trial does not know, and Nesterov's momentum."""
        lanes = range(start, stop)
        first = [self._epoch == 0 and step < self._every[lane] for lane in lanes]
        settings = [self._jobs[lane].sgd for lane in lanes]
        # Without momentum torch.optim.SGD keeps no buffer, and dampening has no meaning.
        damped = [s.dampening if s.momentum and not new else 0.0 for s, new in zip(settings, first, strict=True)]
        share_K, nesterov_K = self._column([1 - d for d in damped]), self._nesterov_K[start:stop]
        for gradient, p, buffer, momentum, decay, rate in zip(gradients, *tensors, strict=True):
            gradient = gradient + p * decay
            buffer.mul_(momentum).add_(gradient * _beside(share_K, p))
            ahead = torch.where(_beside(nesterov_K, p) > 0, gradient + buffer * momentum, buffer)
            p.addcmul_(ahead, rate)

    def _rates(self, steps: int) -> Tensor:
        """The learning rate of each lane at each step of this epoch, SK: that of the lane's own batch there."""
        columns = []
        for job, every in zip(self._jobs, self._every, strict=True):
            own = -(-self._task.train.size // job.sgd.batch_size)
            rates = [job.sgd.rate(self._epoch + batch / own, self._task.epochs) for batch in range(own)]
            columns.append([rates[step // every] for step in range(steps)])
        return torch.tensor(columns, dtype=torch.float32).t().contiguous().to(self._task.device)

    def _evaluate(self) -> Tensor:
        """Loss and metrics of each lane over the validation examples, KM."""
        rows, sizes = [], []
        for batch in self._task.validation.batches(EVALUATION_BATCH):
            leaves = tree_leaves(batch)
            rows.append(self._program.evaluate.run(*self._trained, *self._fixed, *leaves)[0])
            sizes.append(len(leaves[0]))
        return weighted_mean(rows, sizes)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._task.device)


def _beside(values_K: Tensor, tensor: Tensor) -> Tensor:
    """One number for each lane, in the type of `tensor` and shaped to be multiplied with it."""
    return values_K.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
