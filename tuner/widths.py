"""Which trials are trained together, where each has widths of its own: an estimate of the time decides.

A wide stack pads narrow lanes, and works on zeros; many small stacks start more operations. So the trials are split in
two, by one of their sizes, for as long as that takes less time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from tuner.padding import Form, layout, wide_numbers, wide_sizes
from tuner.program import sample
from tuner.train import Job, Task, call

RECORD_SECONDS = 0.1
"""What a program costs before its first step."""


@dataclass(frozen=True)
class Speed:
    """Seconds to start the operations of one step (alone, in a stack, in a stack of several batch sizes), for each
    multiplication of a step, and for each weight's update.

    Estimates: only their relations matter.
    """

    alone: float
    stacked: float
    mixed: float
    product: float
    weight: float


CPU = Speed(alone=5e-4, stacked=6e-4, mixed=8e-4, product=4e-11, weight=5e-9)
"""One core, measured with 2 to 24 lanes of 1 to 3 layers of 16 to 128 units, batches of 32 and 256."""

ACCELERATOR = Speed(alone=5e-4, stacked=6e-4, mixed=8e-4, product=4e-13, weight=2e-11)
"""Not measured: from the peak figures of data-centre GPUs."""


@dataclass(frozen=True)
class Member:
    """A trial with its network, and what can be compared of it: `kind` is its exact signature."""

    job: Job
    module: nn.Module
    kind: Hashable
    form: Form


@dataclass(frozen=True)
class Wide:
    """The sizes and whole numbers of a network that others are padded to."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]


def families(members: Sequence[Member]) -> list[list[Member]]:
    """Members of one skeleton, apart where whole numbers differ that are no sizes."""
    allowed = wide_numbers([m.form for m in members], wide_sizes([m.form for m in members]))
    others = [index for index, values in enumerate(allowed) if not values]
    found: dict[Hashable, list[Member]] = {}
    for member in members:
        found.setdefault(tuple(member.form.numbers[index] for index in others), []).append(member)
    return list(found.values())


class Choice:
    """Splits the members of one family into the stacks that take the least time, by estimate.

    `known` are the networks that programs have been recorded for; a new one has to be worth its record.
    """

    def __init__(self, members: Sequence[Member], known: Sequence[Wide], task: Task, lanes: int) -> None:
        self._members, self._task, self._lanes = list(members), task, lanes
        self._speed = CPU if task.device.type == "cpu" else ACCELERATOR
        self._layout = list(zip(layout(members[0].module), _positions(members[0].module, task), strict=True))
        self._known = [(wide, self._work(wide.sizes)) for wide in known]

    def clusters(self) -> list[tuple[list[Member], Wide]]:
        """Members that are to be padded to the same sizes, and these; those in none are better off without."""
        chosen = []
        for cluster in self._split(self._members):
            taken, sizes = self._padded(cluster, _largest(cluster))
            if len({m.kind for m in cluster}) > 1 and taken < self._exact(cluster):
                chosen.append((cluster, self._wide(cluster, sizes)))
        return chosen

    def stacks(self, cluster: Sequence[Member], wide: Wide, mixable: bool) -> list[list[Member]]:
        """A cluster by batch size, or mixed where that is allowed and pays; at most as many as there are lanes."""
        _, groups = self._by_batch_size(cluster, self._work(wide.sizes), mixable)
        parts = [[m for m in cluster if m.job.sgd.batch_size in group] for group in groups]
        cuts = [(part, -(-len(part) // self._lanes)) for part in parts]
        return [part[i * len(part) // n : (i + 1) * len(part) // n] for part, n in cuts for i in range(n)]

    def _split(self, members: list[Member]) -> list[list[Member]]:
        """The members in clusters: divided by one of their sizes where that saves most, and again."""
        least, best = self._seconds(members, _largest(members)), None
        for column in dict.fromkeys(zip(*(m.form.sizes for m in members), strict=True)):
            order = [m for _, m in sorted(zip(column, members, strict=True), key=lambda pair: pair[0])]
            heights = sorted(column)
            smaller = list(accumulate((m.form.sizes for m in order), _most))
            larger = list(accumulate((m.form.sizes for m in reversed(order)), _most))[::-1]
            for cut in (i for i in range(1, len(order)) if heights[i - 1] < heights[i]):
                taken = self._seconds(order[:cut], smaller[cut - 1]) + self._seconds(order[cut:], larger[cut])
                if taken < least:
                    least, best = taken, (order[:cut], order[cut:])
        return [members] if best is None else [cluster for part in best for cluster in self._split(part)]

    def _seconds(self, members: Sequence[Member], largest: tuple[int, ...]) -> float:
        """The better of padding all of them and none."""
        return min(self._padded(members, largest)[0], self._exact(members))

    def _exact(self, members: Sequence[Member]) -> float:
        """Seconds of the members in stacks of equal signature, or alone."""
        kinds: dict[Hashable, list[Member]] = {}
        for member in members:
            kinds.setdefault(member.kind, []).append(member)
        seconds = 0.0
        for own in kinds.values():
            seconds += self._training(own, self._work(own[0].form.sizes)) + RECORD_SECONDS * (len(own) > 1)
        return seconds

    def _padded(self, members: Sequence[Member], largest: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Seconds of the members in stacks that are padded to the sizes returned: new ones, or known ones they fit."""
        ways = [(self._training(members, self._work(largest)) + RECORD_SECONDS, largest)]
        fitting = [(work, wide.sizes) for wide, work in self._known if _most(wide.sizes, largest) == wide.sizes]
        if fitting:
            work, sizes = min(fitting)
            ways.append((self._training(members, work), sizes))
        return min(ways)

    def _training(self, members: Sequence[Member], work: tuple[float, int]) -> float:
        """Seconds of all epochs of these members, each in a network of this work."""
        return self._task.epochs * self._by_batch_size(members, work, True)[0]

    def _by_batch_size(
        self, members: Sequence[Member], work: tuple[float, int], mixable: bool
    ) -> tuple[float, list[list[int]]]:
        """The least seconds of an epoch, and which batch sizes are trained together for that.

        Those that are may be one, or neighbours that are multiples of each other.
        """
        sizes = [m.job.sgd.batch_size for m in members]
        different = sorted(set(sizes))
        best: list[tuple[float, list[list[int]]]] = [(0.0, [])]
        for end in range(1, len(different) + 1):
            ways = []
            for start in reversed(range(end)):
                group = different[start:end]
                if len(group) > 1 and (group[1] % group[0] or not mixable):
                    break
                seconds, groups = best[start]
                seconds += self._epoch(group, sum(map(sizes.count, group)), work)
                ways.append((seconds, [*groups, group]))
            best.append(min(ways))
        return best[-1]

    def _epoch(self, batch_sizes: Sequence[int], count: int, work: tuple[float, int]) -> float:
        """Seconds of one epoch of a stack of `count` lanes; one that is too wide becomes several of equal size."""
        speed, micro = self._speed, batch_sizes[0]
        start = speed.alone if count == 1 else speed.stacked if len(batch_sizes) == 1 else speed.mixed
        lane = micro * work[0] * speed.product + work[1] * speed.weight
        # The evaluation and what else an epoch takes are about four steps more.
        steps = -(-self._task.train.size // micro) + 4
        return steps * (-(-count // self._lanes) * start + count * lane)

    def _work(self, sizes: Sequence[int]) -> tuple[float, int]:
        """Multiplications for each example, three times those of the forward pass, and weights."""
        products, weights, start = 0.0, 0, 0
        for (free, rest), positions in self._layout:
            numel = math.prod(sizes[start : start + free]) * rest
            products += 3 * numel * positions
            weights += numel
            start += free
        return products, weights

    def _wide(self, members: Sequence[Member], sizes: tuple[int, ...]) -> Wide:
        """The known network of these sizes, if the members fit into it, or a new one."""
        forms = [m.form for m in members]
        for wide, _ in self._known:
            allowed = wide_numbers(forms, wide.sizes)
            if wide.sizes == sizes and all(n in values for n, values in zip(wide.numbers, allowed, strict=True)):
                return wide
        sizes = wide_sizes(forms)
        return Wide(sizes, tuple(min(values) for values in wide_numbers(forms, sizes)))


def _largest(members: Sequence[Member]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*(m.form.sizes for m in members), strict=True))


def _most(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, one, other))


def _positions(module: nn.Module, task: Task) -> list[float]:
    """How often each tensor's numbers are multiplied with, for each example: at each position of its layer's output."""
    module = copy.deepcopy(module).eval()
    found = {id(t): 0.0 for t in [*module.parameters(), *module.buffers()]}
    inputs, _ = sample(task.train, 1)

    def count(layer: nn.Module, _: object, output: object) -> None:
        for p in layer.parameters(recurse=False):
            if isinstance(output, Tensor) and p.dim() > 1:
                found[id(p)] += output.numel() / p.shape[0]

    for layer in module.modules():
        layer.register_forward_hook(count)
    with torch.no_grad():
        call(module, inputs)
    return list(found.values())
