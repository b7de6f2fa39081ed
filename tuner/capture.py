"""Record what a function of tensors does as a plain list of PyTorch operations, once for all numbers of lanes.

``vmap`` and autograd decide for each operation anew what to do with it, which costs more than the arithmetic of small
networks. What they decide on is recorded here, by a dispatch mode below both of them, and is then done again without
them. A record has its sizes written into it, so the function is recorded for three pairs of sizes: a number that
follows the lanes or the examples from one record to the next is computed from the arguments, all others stay.

(`torch.fx.experimental.proxy_tensor.make_fx` records in the same way, for one pair of sizes; its symbolic sizes do not
go through ``vmap``, and importing it takes as long as a small study.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tuner.listing import Form, Listing, NotCapturable, Operation, Size, Slot, function_of, source_of
from tuner.rewrite import rewrite

SIZES = ((5, 11), (7, 11), (5, 13))
"""(lanes, examples) of the three records: different primes, so that a number follows one of them only on purpose."""

REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""What such operations give depends on values, which are others at the next call."""


@dataclass(frozen=True)
class Captured:
    """A recorded function: `run` takes its flat arguments and returns its flat results.

    `random` says whether it draws random numbers; `source` is the Python text of `run`.
    """

    run: Callable[..., list[Tensor]]
    random: bool
    source: str


class _Recorder(TorchDispatchMode):
    """Writes down each operation below ``vmap`` and autograd."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.constants: dict[int, Tensor] = {}
        self.forms: list[Form] = []
        self._storages: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        # All of them are kept: the number of a tensor that is gone is given to the next one.
        self._alive: list[Any] = list(arguments)
        for tensor in arguments:
            self._place(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and the compiler takes 2 s to import.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in REFUSED):
            raise NotCapturable(f"{func} depends on the values of its tensors")
        written = tree_map_only(Tensor, self.slot_of, (args, kwargs))
        result = func(*args, **kwargs)
        results = tree_leaves(result)
        self._alive += [result, *results]
        slots = tuple(self._place(tensor) if isinstance(tensor, Tensor) else None for tensor in results)
        self.operations.append(Operation(func, written[0], written[1], slots, isinstance(result, Tensor)))
        return result

    def slot_of(self, tensor: Tensor) -> Slot:
        """The slot of a tensor; one that nobody has made here is a constant."""
        if id(tensor) not in self._slots:
            self.constants[self._place(tensor)] = tensor
            self._alive.append(tensor)
        return Slot(self._slots[id(tensor)])

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._note(tensor)
        return self._slots.setdefault(id(tensor), len(self._slots))

    def _note(self, tensor: Tensor) -> None:
        """Write down the form of the next slot's tensor."""
        memory = tensor.untyped_storage()
        storage = self._storages.setdefault(memory._cdata, len(self._storages))
        whole = memory.nbytes() == tensor.numel() * tensor.element_size()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        self.forms.append(Form((shape,), (stride,), tensor.dtype, tensor.device, storage, whole))


def capture(function: Callable[..., Any], arguments: Callable[[int, int], Sequence[Tensor]], examples: int) -> Captured:
    """Record a function of tensors.

    Args:
        function: Takes tensors, returns a pytree of tensors. It may write into its arguments, and do nothing else.
        arguments: Gives new arguments for (lanes, examples). The first one has the lanes as its first dimension.
        examples: Which argument has the examples as its first dimension.

    Raises `NotCapturable`, and what the function itself raises.
    """
    records = []
    for sizes in SIZES:
        given = list(arguments(*sizes))
        recorder = _Recorder(given)
        with recorder:
            results = tree_leaves(function(*given))
        if not all(isinstance(result, Tensor) for result in results):
            raise NotCapturable("it returns something that is no tensor")
        records.append((recorder, [recorder.slot_of(result).index for result in results]))
    if any(slots != records[0][1] for _, slots in records):
        raise NotCapturable("it returns other tensors at other sizes")
    recorders = [recorder for recorder, _ in records]
    listing = Listing(
        operations=_merge([recorder.operations for recorder in recorders]),
        results=records[0][1],
        arguments=len(given),
        examples=examples,
        constants=_same_constants([recorder.constants for recorder in recorders]),
        forms=_same_forms([recorder.forms for recorder in recorders]),
    )
    random = any(operation.draws for operation in listing.operations)
    listing = rewrite(listing)
    source = source_of(listing)
    return Captured(function_of(listing, source), random, source)


def _merge(records: Sequence[Sequence[Operation]]) -> list[Operation]:
    """One list of operations for all sizes."""
    first = records[0]
    if any([o.function for o in record] != [o.function for o in first] for record in records):
        raise NotCapturable("it does other operations at other sizes")
    merged = []
    for operations in zip(*records, strict=True):
        if any(o.results != operations[0].results for o in operations):
            raise NotCapturable(f"{operations[0].function} gives other results at other sizes")
        args, kwargs = (_general([getattr(o, name) for o in operations]) for name in ("args", "kwargs"))
        one = operations[0]
        merged.append(Operation(one.function, args, kwargs, one.results, one.single))
    return merged


def _general(values: Sequence[Any]) -> Any:
    """What three records have at the same place, for all sizes."""
    one, more_lanes, more_examples = values
    if isinstance(one, (list, tuple)):
        if len({len(value) for value in values}) > 1:
            raise NotCapturable("a list has other lengths at other sizes")
        return type(one)(_general(items) for items in zip(*values, strict=True))
    if isinstance(one, dict):
        return {key: _general([value[key] for value in values]) for key in one}
    if one == more_lanes == more_examples:
        return one
    if type(one) not in (int, float):
        raise NotCapturable(f"an argument is {one}, then {more_lanes}, then {more_examples}")
    (lanes, examples), (lanes_2, _), (_, examples_2) = SIZES
    powers = [_power(one, more_lanes, lanes, lanes_2), _power(one, more_examples, examples, examples_2)]
    factor = one / (lanes ** powers[0] * examples ** powers[1])
    if isinstance(one, int):
        if factor != int(factor):
            raise NotCapturable(f"a size of {one} does not follow the numbers of lanes and examples")
        factor = int(factor)
    return Size(factor, *powers)


def _power(value: float, other: float, size: int, other_size: int) -> int:
    for power in (0, 1, -1):
        if value * other_size**power == other * size**power or (
            isinstance(value, float) and abs(value / other * (other_size / size) ** power - 1) < 1e-12
        ):
            return power
    raise NotCapturable(f"a number in it is {value}, then {other}: it changes from call to call, or with the sizes")


def _same_constants(records: Sequence[Mapping[int, Tensor]]) -> Mapping[int, Tensor]:
    first = records[0]
    for record in records[1:]:
        if record.keys() != first.keys() or any(
            record[slot].shape != tensor.shape or not torch.equal(record[slot], tensor)
            for slot, tensor in first.items()
        ):
            raise NotCapturable("it makes tensors outside of PyTorch's operations that differ with the sizes")
    return first


def _same_forms(records: Sequence[Sequence[Form]]) -> Mapping[int, Form]:
    forms = {}
    for slot, one in enumerate(zip(*records, strict=True)):
        first = one[0]
        if any((form.dtype, form.device, form.storage) != (first.dtype, first.device, first.storage) for form in one):
            raise NotCapturable("its tensors share other memory at other sizes")
        shapes, strides = tuple(form.shapes[0] for form in one), tuple(form.strides[0] for form in one)
        whole = all(form.whole for form in one)
        forms[slot] = replace(first, shapes=shapes, strides=strides, whole=whole)
    return forms
