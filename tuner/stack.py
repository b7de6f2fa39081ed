"""K trials of one signature and one age, trained together: each lane gives what its trial would have given alone.

All lanes read the same stream of micro-batches. A lane whose batch is m micro-batches adds up their gradients and takes
its step at every m-th, and at the epoch's last one, by the mean over the examples that it really saw. The lanes are
sorted by m, so that those that are due are always the first ones.
Legend of names: K lanes, S steps of an epoch, M measures.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tuner.clock import Stopwatch
from tuner.data import epoch_order, epoch_seed
from tuner.device import synchronize
from tuner.padding import part_of
from tuner.program import Program
from tuner.replay import Replay
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
        self._columns: dict[Hashable, Tensor] = {}
        self._micro = settings[0].batch_size
        self._every = [sgd.batch_size // self._micro for sgd in settings]
        self._whole = self._every.count(1)
        self._sums = [torch.zeros_like(t[self._whole :]) for t in self._trained]
        self._momentum_K = self._column([sgd.momentum for sgd in settings])
        self._decay_K = self._column([sgd.weight_decay for sgd in settings])
        self._nesterov_K = self._column([float(sgd.nesterov) for sgd in settings])
        # A graph is of the tensors that there are now; and one would draw other random numbers than a lone trial.
        self._replay = Replay() if self._task.device.type == "cuda" and not self._program.train.random else None
        # Views that every step takes again.
        self._slices: dict[tuple[int, int], tuple[list[Tensor], ...]] = {}
        self._steps: dict[tuple[int, int], list[Tensor]] = {}
        self._constant = all(sgd.schedule == "constant" and not sgd.warmup_epochs for sgd in settings)
        self._plain = not any(sgd.nesterov or (sgd.dampening and sgd.momentum) for sgd in settings)

    def _train(self) -> Tensor:
        """One epoch; returns the mean loss of each lane, without waiting for the device."""
        task, micro = self._task, self._micro
        order_N = epoch_order(task.train.size, self._jobs[0].seed, self._epoch)
        steps = -(-task.train.size // micro)
        rates_SK = self._rates(steps)
        losses, sizes = [], []
        for step, batch in enumerate(task.train.batches(micro, order_N)):
            leaves = tree_leaves(batch)
            sizes.append(len(leaves[0]))
            due = sum(step == steps - 1 or (step + 1) % every == 0 for every in self._every)
            # Of the micro-batches that a lane adds up, all but the epoch's last one are whole.
            taken = tuple(step % every * micro + sizes[-1] for every in self._every[self._whole : due])
            shares_K = self._column([1.0 / examples for examples in taken], ("shares", taken))
            new = self._epoch == 0 and step < self._every[-1] and not self._plain
            losses.append(self._run((sizes[-1], due, taken, step if new else -1), [rates_SK[step], shares_K, *leaves]))
        return weighted_mean(losses, sizes)

    def _run(self, key: tuple[int, int, tuple[int, ...], int], inputs: Sequence[Tensor]) -> Tensor:
        """A step by its record on the device, where it has such."""
        examples, due, _, new = key

        def step(inputs: Sequence[Tensor]) -> Tensor:
            return self._step(inputs, examples, due, new)

        if self._replay is None:
            return step(inputs)
        state = [*self._trained, *self._momenta, *self._sums, *self._fixed]
        return self._replay.run(key, step, inputs, state)

    def _step(self, inputs: Sequence[Tensor], examples: int, due: int, new: int) -> Tensor:
        """Train all lanes on a micro-batch, and update the first `due` of them; returns their losses, K.

        `new` is the number of the step, if it is the first one for some lanes.
        """
        rate_K, shares_K, *leaves = inputs
        whole = self._whole
        *gradients, losses_K = self._program.train.run(*self._trained, *self._fixed, *leaves)
        if whole == len(self._jobs):
            self._update(0, whole, gradients, rate_K, new)
            return losses_K
        if whole:
            self._update(0, whole, [g[:whole] for g in gradients], rate_K, new)
        # Gradients of means become sums over examples.
        torch._foreach_add_(self._sums, [g[whole:] for g in gradients], alpha=examples)
        if due > whole:
            sums = [total[: due - whole] for total in self._sums]
            means = [total * _beside(shares_K, total) for total in sums]
            torch._foreach_zero_(sums)
            self._update(whole, due, means, rate_K, new)
        return losses_K

    def _update(self, start: int, stop: int, gradients: Sequence[Tensor], rate_K: Tensor, new: int) -> None:
        """A step of SGD for the lanes from `start` to `stop`, as ``torch.optim.SGD`` takes it for each."""
        if (start, stop) not in self._slices:
            trained, momenta = ([t[start:stop] for t in tensors] for tensors in (self._trained, self._momenta))
            settings = (self._momentum_K[start:stop], self._decay_K[start:stop])
            columns = ([_beside(c, t) for t in trained] for c in settings)
            self._slices[start, stop] = (trained, momenta, *columns, [m[start:stop] for m in self._masks or ()])
        trained, momenta, momentum, decay, masks = self._slices[start, stop]
        if not self._constant or (start, stop) not in self._steps:
            less_K = -rate_K[start:stop]
            self._steps[start, stop] = [_beside(less_K, t) for t in trained]
        rate = self._steps[start, stop]
        if not self._plain:
            gradients = torch._foreach_mul(list(gradients), masks) if masks else gradients
            self._update_fully(start, stop, gradients, (trained, momenta, momentum, decay, rate), new)
            return
        torch._foreach_mul_(momenta, momentum)
        if masks:
            torch._foreach_addcmul_(momenta, list(gradients), masks)
        else:
            torch._foreach_add_(momenta, list(gradients))
        torch._foreach_addcmul_(momenta, trained, decay)
        torch._foreach_addcmul_(trained, momenta, rate)

    def _update_fully(
        self, start: int, stop: int, gradients: Sequence[Tensor], tensors: tuple[list[Tensor], ...], new: int
    ) -> None:
        """The same with dampening, which the first step of a trial does not know, and Nesterov's momentum."""
        lanes = range(start, stop)
        first = [0 <= new < self._every[lane] for lane in lanes]
        settings = [self._jobs[lane].sgd for lane in lanes]
        # Without momentum torch.optim.SGD keeps no buffer, and dampening has no meaning.
        damped = [s.dampening if s.momentum and not is_new else 0.0 for s, is_new in zip(settings, first, strict=True)]
        share_K, nesterov_K = (
            self._column([1 - d for d in damped], ("damped", start, stop, new)),
            self._nesterov_K[start:stop],
        )
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

    def _column(self, values: Sequence[float], key: Hashable = None) -> Tensor:
        """Numbers of lanes on the device; those of a key are copied there once."""
        if key is not None and key in self._columns:
            return self._columns[key]
        column_K = torch.tensor(values, dtype=torch.float32, device=self._task.device)
        if key is not None:
            self._columns[key] = column_K
        return column_K


def _beside(values_K: Tensor, tensor: Tensor) -> Tensor:
    """One number for each lane, in the type of `tensor` and shaped to be multiplied with it."""
    return values_K.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
