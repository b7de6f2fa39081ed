"""What two networks must share to run the same program, as a value that can be compared."""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NOT_SETTINGS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its tensors and layers."""


def signature(module: nn.Module, loss_key: Hashable) -> tuple[Hashable, Hashable, Hashable]:
    """What two networks must share to run the same program: structure, shapes, every setting that is not a tensor."""
    layers = []
    known = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
    for name, layer in module.named_modules(remove_duplicate=False):
        settings = {k: v for k, v in vars(layer).items() if k not in NOT_SETTINGS}
        layers.append((name, type(layer), frozen(settings, known)))
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad, t.stride())
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    return (tuple(layers), tuple(tensors), loss_key)


def difference(one: Hashable, other: Hashable) -> str:
    """What keeps trials of these two signatures apart, in words."""
    (layers, tensors, _), (other_layers, other_tensors, _) = one, other  # type: ignore[misc]
    if [t[:2] for t in tensors] != [t[:2] for t in other_tensors]:  # type: ignore[has-type]
        return "the shapes of their weights"
    for a, b in zip(layers, other_layers, strict=False):  # type: ignore[has-type]
        if a != b:
            return f"the settings of {a[0] or 'the network'} ({a[1].__name__})"
    return "what their loss depends on"


def frozen(value: Any, known: Mapping[int, str]) -> Hashable:
    """A setting as something that is equal exactly if the settings are; an unknown object equals only itself.

    `known` are the names of the network's own tensors by `id`: layers keep lists of them.
    """
    if value is None or isinstance(value, (bool, int, str, bytes, torch.dtype, torch.device, torch.Size)):
        return (type(value), value)
    if isinstance(value, Tensor):
        return known.get(id(value)) or (value.dtype, tuple(value.shape), tuple(value.detach().flatten().tolist()))
    if isinstance(value, weakref.ref):
        return frozen(value(), known)
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(frozen(item, known) for item in value))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(frozen(item, known) for item in value))
    if isinstance(value, dict):
        return (type(value), tuple((frozen(k, known), frozen(v, known)) for k, v in value.items()))
    if isinstance(value, types.FunctionType) and value.__closure__ is None and not value.__defaults__:
        return (types.FunctionType, value.__code__)
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return (type(value), id(value))
    return ("only itself", id(value))
