"""Networks that differ in their sizes alone, made parts of a wider one.

A layer with fewer units is a wider layer whose surplus weights are zero: what goes into a surplus unit and what comes
out of it is multiplied by zero. It stays so if the gradients of the surplus weights are made zero, for SGD then changes
nothing in them. Where that is not all (a norm or a softmax over the width, random numbers drawn by shape), a
comparison with the network itself finds it: `tuner.program.Program.check`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from tuner.signature import NOT_SETTINGS, frozen

ROUND = 16
"""Padded sizes are multiples of this, so that trials to come find a program that they fit."""


@dataclass(frozen=True)
class Form:
    """A network's signature, taken apart: `skeleton` is what all sizes are left out of.

    `sizes` are the dimensions of its tensors, one after the other; `numbers` are the whole numbers among its layers'
    attributes, some of which are sizes, too.
    """

    skeleton: Hashable
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]


def form(module: nn.Module, loss_key: Hashable) -> Form:
    """The form of a network; `loss_key` becomes part of its skeleton."""
    known = {id(t): name for name, t in _tensors(module)}
    layers: list[Hashable] = []
    numbers: list[int] = []
    for name, layer in module.named_modules(remove_duplicate=False):
        settings = _settings(layer)
        numbers += _numbers(settings)
        layers.append((name, type(layer), frozen(_with_numbers(settings, repeat(0)), known)))
    kernels = _kernels(module)
    tensors: list[Hashable] = []
    sizes: list[int] = []
    for name, tensor in _tensors(module):
        free = _free(tensor, kernels)
        sizes += tensor.shape[:free]
        rest = (tuple(tensor.shape[free:]), tensor.dim(), tensor.stride() if not free else None)
        tensors.append((name, tensor.dtype, tensor.requires_grad, rest))
    return Form((tuple(layers), tuple(tensors), loss_key), tuple(sizes), tuple(numbers))


def wide_sizes(forms: Sequence[Form]) -> tuple[int, ...]:
    """Sizes that each of these networks fits into. One that is a multiple of another in all of them stays so."""
    columns = list(zip(*(f.sizes for f in forms), strict=True))
    wide: dict[tuple[int, ...], int] = {}
    for column in sorted(set(columns), key=max):
        if len(set(column)) == 1:
            wide[column] = column[0]
            continue
        multiples = ((_multiple(column, base), size) for base, size in wide.items() if len(set(base)) > 1)
        found = next((factor * size for factor, size in multiples if factor), None)
        wide[column] = found or -(-max(column) // ROUND) * ROUND
    return tuple(wide[column] for column in columns)


def wide_numbers(forms: Sequence[Form], sizes: Sequence[int]) -> list[set[int]]:
    """What each number may be in a network of these wide sizes: what it is in all, or the size that it follows.

    An empty set: the number differs, and follows no size.
    """
    columns = zip(zip(*(f.sizes for f in forms), strict=True), sizes, strict=True)
    # A size that nothing changes says nothing about a number that stays the same.
    pairs = {(column, size) for column, size in columns if set(column) != {size}}
    found: list[set[int]] = []
    for column in zip(*(f.numbers for f in forms), strict=True):
        same = {column[0]} if len(set(column)) == 1 else set()
        found.append(same | {factor * size for base, size in pairs if (factor := _multiple(column, base))})
    return found


def template(module: nn.Module, sizes: Sequence[int], numbers: Sequence[int]) -> nn.Module:
    """A copy of `module` with other sizes; its weights are those of `module`, padded."""
    wide = copy.deepcopy(module)
    tensors = [tensor for _, tensor in _tensors(wide)]
    padded = {id(t): _padded(t, shape) for t, shape in zip(tensors, shapes(wide, sizes), strict=True)}
    values = iter(numbers)
    for layer in wide.modules():
        for held in (layer._parameters, layer._buffers):
            for name, one in held.items():
                if one is not None:
                    held[name] = padded[id(one)]  # type: ignore[assignment]
    for _, layer in wide.named_modules(remove_duplicate=False):
        vars(layer).update(_with_numbers(_settings(layer), values))
    return wide


def shapes(module: nn.Module, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes that the tensors of a network of this skeleton have with these sizes: parameters, then buffers."""
    given, kernels = iter(sizes), _kernels(module)
    frees = [(tensor, _free(tensor, kernels)) for _, tensor in _tensors(module)]
    return [(*islice(given, free), *tensor.shape[free:]) for tensor, free in frees]


def layout(module: nn.Module) -> list[tuple[int, int]]:
    """For each tensor, in the same order: how many of the sizes are its own, and the elements for each of them."""
    kernels = _kernels(module)
    frees = [(tensor, _free(tensor, kernels)) for _, tensor in _tensors(module)]
    return [(free, tensor.shape[free:].numel()) for tensor, free in frees]


def pad(tensor: Tensor, shape: Sequence[int], rest: float = 0.0) -> Tensor:
    """`tensor` at the start of one of this shape, with `rest` behind it; the tensor itself where it has the shape."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    wide = torch.full(tuple(shape), rest, dtype=tensor.dtype, device=tensor.device)
    part_of(wide, tensor.shape).copy_(tensor)
    return wide


def rest_of(tensor: Tensor) -> float:
    """What pads a network's tensor: zero, but one for buffers of one dimension, which are often divided by."""
    return float(tensor.is_floating_point() and tensor.dim() == 1 and not isinstance(tensor, nn.Parameter))


def mask(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """One where `pad` puts the tensor, zero elsewhere."""
    wide = torch.zeros(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    part_of(wide, tensor.shape).fill_(1)
    return wide


def part_of(wide: Tensor, shape: Sequence[int]) -> Tensor:
    """The view of `wide` where `pad` puts a tensor of this shape."""
    return wide[tuple(slice(size) for size in shape)]


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same, where a parameter stays one."""
    wide = pad(tensor.detach(), shape, rest_of(tensor))
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _kernels(module: nn.Module) -> set[int]:
    return {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd)}


def _free(tensor: Tensor, kernels: set[int]) -> int:
    """How many of its first dimensions may differ: the others are a convolution's extent, or in another order."""
    if not tensor.is_contiguous():
        return 0
    return 2 if id(tensor) in kernels else tensor.dim()


def _settings(layer: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name not in NOT_SETTINGS}


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers in a setting, in order."""
    if type(value) is int:
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _numbers(item)
    elif type(value) in (dict, OrderedDict):
        yield from _numbers(list(value.values()))


def _with_numbers(value: Any, numbers: Iterator[int]) -> Any:
    """A setting with other whole numbers, in the same order."""
    if type(value) is int:
        return next(numbers)
    if type(value) in (list, tuple):
        return type(value)(_with_numbers(item, numbers) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_numbers(item, numbers)) for key, item in value.items())
    return value


def _multiple(column: Sequence[int], base: Sequence[int]) -> int:
    """The whole number that `column` is `base` times, or 0."""
    factor = column[0] // base[0] if base[0] else 0
    return factor if factor > 0 and all(a == factor * b for a, b in zip(column, base, strict=True)) else 0
