"""One network's training step and evaluation as functions of stacked parameters, recorded once for any number of lanes.

Trials whose networks have the same signature run the same program, and so do narrower networks, padded
(`tuner.padding`). What a program does is compared with the network itself before it is used (`Program.check`).
Legend of names: K lanes, B examples, P parameters, M measures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tuner.capture import Captured, capture
from tuner.data import Batch, Source
from tuner.device import widest
from tuner.listing import NotCapturable
from tuner.padding import mask, pad, part_of, rest_of
from tuner.signature import frozen, signature
from tuner.train import Job, Loss, Task, call, seed_generators

TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "bf16": 5e-2}
"""How far a lane's loss and gradient may be from its own network's, relative to their size."""

PROBE_EXAMPLES = 8

PROBE_NOISE = 0.1
"""Padded networks are compared with random changes of this size to their weights: what a difference of theirs is
multiplied with may be zero at the start."""


class CannotStack(Exception):  # noqa: N818 - no error: the trials run alone
    """Trials of this kind cannot be trained as a stack; the message says why, once, to the user."""


class Program:
    """The recorded step and evaluation of one signature.

    `trained` and `fixed` are the names of the stacked tensors in the order of the arguments: parameters that get
    gradients, and everything else (frozen or unused parameters, buffers). `mixable` says whether a batch may be split
    into micro-batches: the loss is a mean over examples, and nothing is drawn at random.
    """

    def __init__(self, job: Job, module: nn.Module, task: Task) -> None:
        self._module = copy.deepcopy(module)  # Recording calls it, and may change what it remembers.
        self._task = task
        self._tolerance = TOLERANCES[task.precision]
        self.trained, self.fixed = _names(module, job.loss, task)
        self._shapes = {n: t.shape for n, t in [*module.named_parameters(), *module.named_buffers()]}
        inputs_target = sample(task.train, PROBE_EXAMPLES)
        leaves, self._structure = tree_flatten(inputs_target)
        self._loss = job.loss
        stacked = len(self.trained) + len(self.fixed)
        self.train = self._capture(self._step, task.train, stacked)
        self.evaluate = self._capture(self._evaluate, task.validation, stacked)
        self.mixable = not self.train.random and self._is_mean(leaves)

    def tensors(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The module's tensors in the order of `trained` and `fixed`, padded to the program's shapes."""
        named = dict([*module.named_parameters(), *module.named_buffers()])
        padded = {n: pad(t.detach(), self._shapes[n], rest_of(t)) for n, t in named.items()}
        return [padded[n] for n in self.trained], [padded[n] for n in self.fixed]

    def masks(self, modules: Sequence[nn.Module]) -> list[Tensor] | None:
        """For each of `trained`, stacked: one where a lane has weights of its own, else zero. None without padding."""
        named = [dict([*module.named_parameters(), *module.named_buffers()]) for module in modules]
        if all(tensors[n].shape == shape for tensors in named for n, shape in self._shapes.items()):
            return None
        return [torch.stack([mask(tensors[n], self._shapes[n]) for tensors in named]) for n in self.trained]

    def check(self, modules: Sequence[nn.Module], losses: Sequence[Loss], seeds: Sequence[int]) -> None:
        """Compare each lane with its own network, on a few examples: loss, gradient, buffers.

        The evaluation is compared as well; where lanes are padded, all of it with changed weights.

        Raises `CannotStack` on any difference that is not rounding, and where a forward pass changes something that is
        no tensor, which a record would not repeat. The modules are used up: their tensors may have changed.
        """
        masks = self.masks(modules)
        if masks is not None:
            _add_noise(modules)
        leaves = tree_leaves(sample(self._task.train, PROBE_EXAMPLES))
        batch = tree_unflatten(leaves, self._structure)
        lists = [self.tensors(module) for module in modules]
        trained = [torch.stack(tensors) for tensors in zip(*(t for t, _ in lists), strict=True)]
        fixed = [torch.stack(tensors) for tensors in zip(*(f for _, f in lists), strict=True)]
        seed_generators(seeds[0])
        *gradients, losses_K = self.train.run(*trained, *fixed, *leaves)
        if masks is not None:
            gradients = list(torch._foreach_mul(gradients, masks))
        measured_KM = self.evaluate.run(*trained, *fixed, *leaves)[0]
        for lane, (module, loss) in enumerate(zip(modules, losses, strict=True)):
            seed_generators(seeds[lane])
            before = _plain_state(module.train(), loss)
            value, own, buffers = _alone(module, loss, batch, self.trained, self.fixed, self._task)
            if _plain_state(module, loss) != before:
                raise CannotStack("its forward pass or its loss changes an attribute")
            mine = [part_of(f[lane], b.shape) for f, b in zip(fixed, buffers, strict=True)]
            padded = [pad(g, self._shapes[n]) for n, g in zip(self.trained, own, strict=True)]
            lane_K = (losses_K[lane], [g[lane] for g in gradients], mine)
            _compare(lane_K, (value, padded, buffers), self._tolerance)
            if not self.evaluate.random:
                measured = _measured(module, loss, batch, self._task)
                if not _distance([measured_KM[lane]], [measured]) < self._tolerance:
                    raise CannotStack("its evaluation in a stack differs from that alone")
        if masks is not None and not torch.isfinite(losses_K).all():
            raise CannotStack("losses are not finite with changed weights")

    def _capture(self, function: Callable[..., Any], source: Source, stacked: int) -> Captured:
        tensors = [tensor for part in self.tensors(self._module) for tensor in part]

        def arguments(lanes: int, examples: int) -> list[Tensor]:
            stacks = [torch.stack([tensor] * lanes) for tensor in tensors]
            return [*stacks, *tree_leaves(sample(source, examples))]

        try:
            return capture(function, arguments, stacked)
        except NotCapturable as why:
            raise CannotStack(str(why)) from None
        except Exception as error:
            text = " ".join(str(error).split()).partition(". ")[0][:200]
            raise CannotStack(f"vmap cannot do it: {text}") from None

    def _step(self, *arguments: Tensor) -> list[Tensor]:
        """Gradients by `trained`, and the loss of each lane."""
        count = len(self.trained)
        trained = [tensor.detach().requires_grad_() for tensor in arguments[:count]]
        fixed = list(arguments[count : count + len(self.fixed)])
        batch = tree_unflatten(list(arguments[count + len(self.fixed) :]), self._structure)
        self._module.train()

        def loss_of(trained: list[Tensor], fixed: list[Tensor]) -> Tensor:
            return self._loss(self._call(trained, fixed, batch[0]), batch[1])

        with self._task.autocast():
            losses_K = self._per_lane(loss_of, trained, fixed)
        # The sum: a mean over the lanes would divide every gradient by their number.
        return [*torch.autograd.grad(losses_K.sum(), trained), losses_K.detach()]

    def _evaluate(self, *arguments: Tensor) -> Tensor:
        """Loss and metrics by lane, KM, means over the examples."""
        count = len(self.trained)
        trained, fixed = list(arguments[:count]), list(arguments[count : count + len(self.fixed)])
        batch = tree_unflatten(list(arguments[count + len(self.fixed) :]), self._structure)
        self._module.eval()
        measures = (self._loss, *self._task.metrics.values())
        kind = widest(self._task.device)

        def measure(trained: list[Tensor], fixed: list[Tensor]) -> Tensor:
            output = self._call(trained, fixed, batch[0])
            return torch.stack([torch.as_tensor(m(output, batch[1])).to(kind) for m in measures])

        # Attention has a fused path for evaluation, which vmap would take lane by lane.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), self._task.autocast():
                return self._per_lane(measure, trained, fixed)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)

    def _per_lane(self, function: Callable[..., Tensor], trained: list[Tensor], fixed: list[Tensor]) -> Tensor:
        # All lanes have the same seed, so they draw the same random numbers, as each would alone.
        result: Tensor = vmap(function, in_dims=(0, 0 if fixed else None), randomness="same")(trained, fixed)
        return result

    def _call(self, trained: list[Tensor], fixed: list[Tensor], inputs: Any) -> Any:
        named = dict(zip((*self.trained, *self.fixed), (*trained, *fixed), strict=True))
        if isinstance(inputs, dict):
            return functional_call(self._module, named, (), inputs)
        return functional_call(self._module, named, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))

    def _is_mean(self, leaves: Sequence[Tensor]) -> bool:
        """Whether the loss of a batch is the mean of its halves'."""
        trained, fixed = ([torch.stack([t]) for t in part] for part in self.tensors(self._module))
        return adds_up(
            lambda batch: self.train.run(*trained, *[t.clone() for t in fixed], *batch), leaves, self._task.precision
        )


def adds_up(gradients: Callable[[Sequence[Tensor]], list[Tensor]], leaves: Sequence[Tensor], precision: str) -> bool:
    """Whether the gradients (and loss) of a batch of an even number of examples are the mean of its halves'."""
    half = len(leaves[0]) // 2
    whole = gradients(leaves)
    halves = [gradients([t[:half] for t in leaves]), gradients([t[half:] for t in leaves])]
    mean = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
    return _distance(mean, whole) < TOLERANCES[precision]


def _plain_state(module: nn.Module, loss: Loss) -> Hashable:
    """Everything of a network and a loss that is no tensor of the network's."""
    cells = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    return (signature(module, None)[0], frozen([getattr(loss, "__dict__", {}), cells], {}))


def sample(source: Source, count: int) -> Batch:
    """The first `count` examples of `source`, again from the start where it has fewer."""
    batch = next(iter(source.batches(min(count, source.size))))
    leaves, structure = tree_flatten(batch)
    times = -(-count // len(leaves[0]))
    inputs, target = tree_unflatten([torch.cat([leaf] * times)[:count] for leaf in leaves], structure)
    return inputs, target


def _names(module: nn.Module, loss: Loss, task: Task) -> tuple[list[str], list[str]]:
    """Parameters that a training step gives a gradient to, and all other tensors.

    One without a gradient is left alone by SGD, where a gradient of zero would still decay it.
    """
    module = copy.deepcopy(module)  # The pass may change it.
    inputs, target = sample(task.train, PROBE_EXAMPLES)
    module.train()
    with task.autocast():
        value = loss(call(module, inputs), target)
    value.backward()
    trained = [name for name, p in module.named_parameters() if p.grad is not None]
    others = [name for name, p in module.named_parameters() if p.grad is None]
    return trained, others + [name for name, _ in module.named_buffers()]


def _alone(
    module: nn.Module, loss: Loss, batch: Batch, trained: Sequence[str], fixed: Sequence[str], task: Task
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss, gradients and buffers after one step's forward and backward pass of the network itself."""
    module.train()
    with task.autocast():
        value = loss(call(module, batch[0]), batch[1])
    value.backward()
    parameters = dict(module.named_parameters())
    named = {**parameters, **dict(module.named_buffers())}
    if any((parameters[n].grad is None) != (n not in trained) for n in parameters):
        raise CannotStack("other parameters get a gradient than in the first trial of its kind")
    gradients = [g for n in trained if (g := parameters[n].grad) is not None]
    for p in parameters.values():
        p.grad = None
    return value.detach(), gradients, [named[n].detach().clone() for n in fixed]


def _add_noise(modules: Sequence[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for module in modules for p in module.parameters()):
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.data.add_(noise, alpha=PROBE_NOISE)


def _measured(module: nn.Module, loss: Loss, batch: Batch, task: Task) -> Tensor:
    """The network's own evaluation of a batch, M."""
    module.eval()
    measures, kind = (loss, *task.metrics.values()), widest(task.device)
    with torch.no_grad(), task.autocast():
        output = call(module, batch[0])
        return torch.stack([torch.as_tensor(m(output, batch[1]), dtype=kind).reshape(()) for m in measures])


Compared = tuple[Tensor, list[Tensor], list[Tensor]]


def _compare(mine: Compared, own: Compared, tolerance: float) -> None:
    for what, a, b in (
        ("losses", [mine[0]], [own[0]]),
        ("gradients", mine[1], own[1]),
        ("buffers", mine[2], own[2]),
    ):
        if not _distance(a, b) < tolerance:
            raise CannotStack(f"{what} in a stack differ from those alone")


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The difference of two lists of tensors, relative to the second, where both are finite, which must be alike."""
    if not a:
        return 0.0
    flat_a, flat_b = (torch.cat([t.reshape(-1).to(torch.float32) for t in tensors]) for tensors in (a, b))
    if not torch.equal(torch.isfinite(flat_a), torch.isfinite(flat_b)):
        return float("inf")
    flat_a, flat_b = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (flat_a, flat_b))
    return float((flat_a - flat_b).norm() / (flat_b.norm() + 1e-12))
