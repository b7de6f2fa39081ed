"""Put trials into trainers: those that can be trained together into stacks, the others alone."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from tuner.device import is_out_of_memory
from tuner.padding import form, template
from tuner.program import CannotStack, Program
from tuner.signature import difference, signature
from tuner.stack import Stack
from tuner.train import Job, Lone, Task, Trainer, build
from tuner.widths import Choice, Member, Wide, families

MIXED_LANES = 4
"""Where groups of one batch size would have fewer lanes than this, on average, batch sizes are mixed in one stack.
Measured: docs/measurements.md."""

LEAST_LANES = 4
"""Recording a kind of network takes as long as training some: fewer trials of a kind, among others, stay alone."""

Built = tuple[Job, nn.Module]
"""A trial and its network."""

Kinds = dict[Hashable, list[Built]]
"""Trials by the signature of their networks."""


@dataclass
class Assembly:
    """What one call of `Assembler.assemble` made; `errors` are the trials that could not be built."""

    trainers: list[Trainer] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class Assembler:
    """Builds the networks of trials and groups them. Programs are kept for trials to come."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._programs: dict[Hashable, Program | None] = {}
        self._padded: dict[Hashable, dict[Wide, Program]] = {}
        self._unpadded: dict[Hashable, str] = {}
        self._why: dict[Hashable, str] = {}
        self._said: set[str] = set()

    def on(self, task: Task) -> Assembler:
        """An assembler for other examples of the same form, which knows the programs of this one."""
        other = copy.copy(self)
        other._task, other._said = task, set()
        return other

    def assemble(self, jobs: Sequence[Job], lanes: int) -> Assembly:
        """Trainers for `jobs`, in stacks of at most `lanes`. Raises what is out of memory, and keeps none of them."""
        made = Assembly()
        kinds: Kinds = {}
        for job in jobs:
            try:
                module = build(job, self._task)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                made.errors[job.number] = error
                continue
            kind: Hashable = signature(module, job.loss_key) if lanes > 1 and len(jobs) > 1 else job.number
            kinds.setdefault(kind, []).append((job, module))
        total = sum(map(len, kinds.values()))
        if lanes > 1 and len(kinds) > 1:
            self._pad(kinds, lanes, made)
        self._say_why_apart(kinds, made, total)
        for kind, members in kinds.items():
            enough = len(members) >= min(LEAST_LANES, max(2, len(jobs) // 8)) or (
                kind in self._programs and len(members) > 1
            )
            program = self._program(kind, *members[0], made) if enough else None
            for group in _groups(members, program, lanes):
                made.trainers += self._train_together(kind, group, program, made)
        return made

    def _pad(self, kinds: Kinds, lanes: int, made: Assembly) -> None:
        """Take those out of `kinds` that are trained in stacks of different widths."""
        skeletons: dict[Hashable, list[Member]] = {}
        for kind, members in kinds.items():
            # Enough trials of equal shapes are a stack that needs no padding.
            for job, module in members if len(members) < MIXED_LANES else ():
                taken = form(module, job.loss_key)
                skeletons.setdefault(taken.skeleton, []).append(Member(job, module, kind, taken))
        for skeleton, alike in skeletons.items():
            for family in families(alike):
                if skeleton in self._unpadded:
                    self._say(self._unpadded[skeleton], made)
                elif any(len(kinds[member.kind]) == 1 for member in family):
                    self._pad_family(skeleton, family, kinds, lanes, made)
        for kind in [kind for kind, members in kinds.items() if not members]:
            del kinds[kind]

    def _pad_family(
        self, skeleton: Hashable, family: Sequence[Member], kinds: Kinds, lanes: int, made: Assembly
    ) -> None:
        """The same for networks that differ in their sizes alone; what cannot be padded stays in `kinds`."""
        known = self._padded.setdefault(skeleton, {})
        try:
            choice = Choice(family, list(known), self._task, lanes)
            for cluster, wide in choice.clusters():
                if wide not in known:
                    network = template(cluster[0].module, wide.sizes, wide.numbers)
                    known[wide] = Program(cluster[0].job, network, self._task)
                for group in choice.stacks(cluster, wide, known[wide].mixable):
                    if len(group) > 1:
                        made.trainers.append(self._stack([(m.job, m.module) for m in group], known[wide]))
                        for member in group:
                            kinds[member.kind].remove((member.job, member.module))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._do_not_pad(skeleton, error, made)
            # The comparison may have changed these networks.
            changed = {m.job.number for m in family}
            for members in kinds.values():
                members[:] = [(job, build(job, self._task) if job.number in changed else m) for job, m in members]

    def _do_not_pad(self, skeleton: Hashable, error: Exception, made: Assembly) -> None:
        why = str(error) if isinstance(error, CannotStack) else f"{type(error).__name__} in a wider network: {error}"
        self._unpadded[skeleton] = f"trials of different widths are not padded to share a stack: {why}"
        self._say(self._unpadded[skeleton], made)

    def _program(self, kind: Hashable, job: Job, module: nn.Module, made: Assembly) -> Program | None:
        if kind not in self._programs:
            try:
                self._programs[kind] = Program(job, module, self._task)
            except CannotStack as why:
                self._give_up(kind, str(why), made)
            except Exception as error:
                if is_out_of_memory(error):
                    raise  # It says nothing of the kind, only of how many there are.
                self._give_up(kind, f"{type(error).__name__} in a training step: {error}", made)
        if kind in self._why:
            self._say(self._why[kind], made)
        return self._programs[kind]

    def _train_together(
        self, kind: Hashable, group: Sequence[Built], program: Program | None, made: Assembly
    ) -> list[Trainer]:
        if program is not None and len(group) > 1:
            try:
                return [self._stack(group, program)]
            except CannotStack as why:
                self._give_up(kind, str(why), made)
                # The comparison may have changed these networks.
                return [Lone(job, self._task) for job, _ in group]
        return [Lone(job, self._task, module) for job, module in group]

    def _stack(self, group: Sequence[Built], program: Program) -> Stack:
        return Stack([job for job, _ in group], [module for _, module in group], program, self._task)

    def _say_why_apart(self, kinds: Kinds, made: Assembly, total: int) -> None:
        """Tell once what keeps trials apart, where most of the `total` have a structure of their own."""
        single = [kind for kind, members in kinds.items() if len(members) == 1]
        if len(single) > 1 and 2 * len(single) > total and isinstance(single[0], tuple) and "apart" not in self._said:
            self._said.add("apart")
            why = f"they differ in {difference(single[0], single[1])}"
            made.notices.append(f"{len(single)} of {total} trials are trained alone, not in a stack: {why}")

    def _give_up(self, kind: Hashable, why: str, made: Assembly) -> None:
        self._programs[kind] = None
        self._why[kind] = f"trials of this kind are trained alone, not in a stack: {why}"
        self._say(self._why[kind], made)

    def _say(self, notice: str, made: Assembly) -> None:
        if notice not in self._said:
            self._said.add(notice)
            made.notices.append(notice)


def _groups(members: Sequence[Built], program: Program | None, lanes: int) -> Iterator[Sequence[Built]]:
    """The members by batch size, or mixed where that is allowed and pays; at most `lanes` together."""
    sizes = sorted({job.sgd.batch_size for job, _ in members})
    chain = all(larger % smaller == 0 for smaller, larger in pairwise(sizes))
    if program is not None and program.mixable and chain and len(members) < MIXED_LANES * len(sizes):
        parts = [list(members)]
    else:
        parts = [[member for member in members if member[0].sgd.batch_size == size] for size in sizes]
    for part in parts:
        # Of equal size: a stack of 64 and one of 1 take longer than two of 32 and 33.
        count = -(-len(part) // lanes)
        for index in range(count):
            yield part[index * len(part) // count : (index + 1) * len(part) // count]
