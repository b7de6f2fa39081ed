"""A recorded list of PyTorch operations as data, and as the Python function that does them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class NotCapturable(Exception):  # noqa: N818 - no error: it is what a model is like
    """The function does something that a record cannot repeat; the message says what."""


@dataclass(frozen=True)
class Slot:
    """A tensor of the list, by its number: arguments first, then constants and results of operations."""

    index: int


@dataclass(frozen=True)
class Size:
    """A number that is `factor` times the lanes and the examples to these powers."""

    factor: Any
    lanes: int
    examples: int

    def __str__(self) -> str:
        text = repr(self.factor)
        for name, power in (("K", self.lanes), ("B", self.examples)):
            text += f" * {name}" * (power > 0) + f" / {name}" * (power < 0)
        return text


@dataclass(frozen=True)
class Form:
    """What is known of a tensor besides its values: its shape and stride in each of the records.

    `storage` is a number that tensors share that share memory. `whole` says that the tensor fills its memory: dense,
    and no part of a larger one.
    """

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    whole: bool

    @property
    def is_scalar(self) -> bool:
        return not any(self.shapes)


@dataclass(frozen=True)
class Operation:
    """One call. `results` are the slots of what it returns, None for what is no tensor; `single`: it is one tensor."""

    function: Any
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]
    single: bool

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def writes(self) -> bool:
        """Whether it changes one of its arguments."""
        return bool(self.function._schema.is_mutable)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def inputs(self) -> list[int]:
        """The slots that it reads, each as often as it does."""
        leaves = tree_leaves((self.args, self.kwargs), is_leaf=lambda value: isinstance(value, (Slot, Size)))
        return [leaf.index for leaf in leaves if isinstance(leaf, Slot)]


@dataclass(frozen=True)
class Listing:
    """Operations in order, on `arguments` tensors; `examples` is the argument whose first dimension counts examples.

    `results` are the slots that it returns; `forms` has what is known of each slot.
    """

    operations: Sequence[Operation]
    results: Sequence[int]
    arguments: int
    examples: int
    constants: Mapping[int, Tensor]
    forms: Mapping[int, Form]

    @property
    def lasting(self) -> set[int]:
        """Tensors that are not the list's own to change: arguments, constants, and what it returns."""
        return {*range(self.arguments), *self.constants, *self.results}


def last_uses(operations: Sequence[Operation]) -> dict[int, int]:
    """By slot, the place of the last operation that reads it."""
    return {slot: at for at, operation in enumerate(operations) for slot in operation.inputs}


def source_of(listing: Listing) -> str:
    """The list as a Python function that lets go of each tensor after its last use."""
    uses, lasting = last_uses(listing.operations), listing.lasting
    lines = [f"def run({', '.join(f't{i}' for i in range(listing.arguments))}):"]
    lines.append(f"    K, B = t0.shape[0], t{listing.examples}.shape[0]")
    for at, o in enumerate(listing.operations):
        texts = [_text(value, listing.constants) for value in o.args]
        texts += [f"{name}={_text(value, listing.constants)}" for name, value in o.kwargs.items()]
        names = ["_" if slot is None else f"t{slot}" for slot in o.results]
        left = names[0] if o.single else f"[{', '.join(names)}]" if names else "_"
        lines.append(f"    {left} = f{at}({', '.join(texts)})")
        gone = {slot for slot in o.inputs if uses[slot] == at}
        gone |= {slot for slot in o.results if slot is not None and slot not in uses}
        if gone - lasting:
            lines.append(f"    del {', '.join(f't{slot}' for slot in sorted(gone - lasting))}")
    lines.append(f"    return [{', '.join(_text(Slot(slot), listing.constants) for slot in listing.results)}]")
    return "\n".join(lines)


def function_of(listing: Listing, source: str) -> Callable[..., list[Tensor]]:
    """The function that `source`, made of `listing`, defines."""
    namespace: dict[str, Any] = {f"f{at}": operation.function for at, operation in enumerate(listing.operations)}
    namespace |= {f"c{slot}": tensor for slot, tensor in listing.constants.items()}
    namespace |= {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(compile(source, "<tuner.capture>", "exec"), namespace)
    run: Callable[..., list[Tensor]] = namespace["run"]
    return run


def _text(value: Any, constants: Collection[int]) -> str:
    """An argument as Python."""
    if isinstance(value, Slot):
        return f"c{value.index}" if value.index in constants else f"t{value.index}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, constants) for item in value)}]"
    if isinstance(value, Size):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, *_TORCH_VALUES)):
        return repr(value)
    raise NotCapturable(f"an operation takes a {type(value).__name__}")


_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
