"""A trial that does not fit the memory, trained with fewer examples at a time. Its batch size stays what it is.

First it is evaluated in smaller batches, which any network can. Then the gradient of a batch is added up from those of
micro-batches, where that is the same: the loss is a mean over examples, and a forward pass depends on nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tuner.device import is_out_of_memory
from tuner.program import PROBE_EXAMPLES, adds_up
from tuner.train import EVALUATION_BATCH, Job, Lone, Task, build, call


def smaller(job: Job, task: Task, tried: int | None) -> Lone | str:
    """The trial from its start, with half of `tried` examples at a time (None: it was tried as it is).

    Returns the reason instead where that cannot be. Raises whatever building the network raises.
    """
    whole = min(job.sgd.batch_size, task.train.size)
    # Where an evaluation takes more examples at a time than a training step, it is the first to shrink.
    first = whole if whole < EVALUATION_BATCH else whole // 2
    micro_batch = first if tried is None else tried // 2
    if micro_batch < 1:
        return f"not even one example at a time fits (batch size {job.sgd.batch_size})"
    module = build(job, task)
    if micro_batch < whole:
        why = _why_whole(job, module, task)
        if why:
            return f"{tried or whole} examples at a time do not fit, and a batch of them cannot be split: {why}"
    return Lone(job, task, module, micro_batch)


def _why_whole(job: Job, module: nn.Module, task: Task) -> str:
    """Why a batch cannot be added up from parts; empty if it can, by comparison on a few examples."""
    most = min(PROBE_EXAMPLES, task.train.size // 2 * 2)
    for examples in (most, 2):
        try:
            return _compared(job, copy.deepcopy(module).train(), task, examples)
        except Exception as error:
            if not is_out_of_memory(error):
                return f"a part of it raises {type(error).__name__}"
            if examples == 2:
                raise
    raise AssertionError("the loop ends by itself")


def _compared(job: Job, module: nn.Module, task: Task, examples: int) -> str:
    # From all over the data: the first ones may all be of one class, and weights of classes would not be seen.
    order_N = torch.linspace(0, task.train.size - 1, examples).long()
    leaves, structure = tree_flatten(next(iter(task.train.batches(examples, order_N))))
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return "its examples are not all tensors"
    trained = [p for p in module.parameters() if p.requires_grad]
    before, drawn = [b.clone() for b in module.buffers()], _generators(task.device)

    def gradients(batch: Sequence[Tensor]) -> list[Tensor]:
        inputs, target = tree_unflatten(list(batch), structure)
        with task.autocast():
            loss = job.loss(call(module, inputs), target)
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [*(torch.zeros_like(p) if g is None else g for g, p in zip(found, trained, strict=True)), loss.detach()]

    if not adds_up(gradients, leaves, task.precision):
        return "its loss is not the mean over the examples (batch statistics, random numbers, a sum)"
    if not all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True)):
        return "its forward pass changes a buffer"
    if not all(torch.equal(a, b) for a, b in zip(drawn, _generators(task.device), strict=True)):
        return "its forward pass draws random numbers"
    return ""


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward pass on `device` may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states
