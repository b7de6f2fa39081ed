"""Record what a function of tensors does as a plain list of PyTorch operations, once for all numbers of lanes.

``vmap`` and autograd decide for each operation anew what to do with it, which costs more than the arithmetic of small
networks. What they decide on is recorded here, by a dispatch mode below both of them, and is then done again without
them. A record has its sizes written into it, so the function is recorded for three pairs of sizes: a number that
follows the lanes or the examples from one record to the next is computed from the arguments, all others stay.

(`torch.fx.experimental.proxy_tensor.make_fx` records in the same way, for one pair of sizes; its symbolic sizes do not
go through ``vmap``, and importing it takes as long as a small study.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

SIZES = ((5, 11), (7, 11), (5, 13))
"""(lanes, examples) of the three records: different primes, so that a number follows one of them only on purpose."""

REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""What such operations give depends on values, which are others at the next call."""

ALIASES = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
"""Operations that give their first argument as it is."""

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.expand.default", "aten.reshape.default")
"""Operations that change nothing where the shape stays the same."""


class NotCapturable(Exception):  # noqa: N818 - no error: it is what a model is like
    """The function does something that a record cannot repeat; the message says what."""


@dataclass(frozen=True)
class Captured:
    """A recorded function: `run` takes its flat arguments and returns its flat results.

    `random` says whether it draws random numbers; `source` is the Python text of `run`.
    """

    run: Callable[..., list[Tensor]]
    random: bool
    source: str


@dataclass(frozen=True)
class _Slot:
    """A tensor of the record, by its number: arguments first, then results of operations in order."""

    index: int


@dataclass(frozen=True)
class _Size:
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
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]
    single: bool
    like_input: bool


class _Recorder(TorchDispatchMode):
    """Writes down each operation below ``vmap`` and autograd."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.constants: dict[int, Tensor] = {}
        self._slots = {id(tensor): index for index, tensor in enumerate(arguments)}
        # All of them are kept: the number of a tensor that is gone is given to the next one.
        self._alive: list[Any] = list(arguments)

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
        shapes = [r.shape for r in results if isinstance(r, Tensor)]
        like_input = bool(args) and isinstance(args[0], Tensor) and shapes == [args[0].shape]
        self.operations.append(_Operation(func, written[0], written[1], slots, isinstance(result, Tensor), like_input))
        return result

    def slot_of(self, tensor: Tensor) -> _Slot:
        """The slot of a tensor; one that nobody has made here is a constant."""
        if id(tensor) not in self._slots:
            self.constants[self._place(tensor)] = tensor
            self._alive.append(tensor)
        return _Slot(self._slots[id(tensor)])

    def _place(self, tensor: Tensor) -> int:
        return self._slots.setdefault(id(tensor), len(self._slots))


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
        records.append((recorder.operations, [recorder.slot_of(r) for r in results], recorder.constants))
    operations = _merge([record[0] for record in records])
    constants = _same_constants([record[2] for record in records])
    count = len(given)
    for _, results, _ in records:
        if results != records[0][1]:
            raise NotCapturable("it returns other tensors at other sizes")
    source = _source(operations, records[0][1], count, examples, set(constants))
    namespace: dict[str, Any] = {f"f{i}": operation.function for i, operation in enumerate(operations)}
    namespace |= {f"c{slot}": tensor for slot, tensor in constants.items()}
    namespace |= {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(compile(source, "<tuner.capture>", "exec"), namespace)
    random = any(torch.Tag.nondeterministic_seeded in operation.function.tags for operation in operations)
    return Captured(namespace["run"], random, source)


def _merge(records: Sequence[Sequence[_Operation]]) -> list[_Operation]:
    """One list of operations for all sizes."""
    first = records[0]
    if any([o.function for o in record] != [o.function for o in first] for record in records):
        raise NotCapturable("it does other operations at other sizes")
    merged = []
    for operations in zip(*records, strict=True):
        if any(o.results != operations[0].results for o in operations):
            raise NotCapturable(f"{operations[0].function} gives other results at other sizes")
        args, kwargs = (_general([getattr(o, name) for o in operations]) for name in ("args", "kwargs"))
        like_input = all(o.like_input for o in operations)
        one = operations[0]
        merged.append(_Operation(one.function, args, kwargs, one.results, one.single, like_input))
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
    return _Size(factor, *powers)


def _power(value: float, other: float, size: int, other_size: int) -> int:
    for power in (0, 1, -1):
        if value * other_size**power == other * size**power or (
            isinstance(value, float) and abs(value / other * (other_size / size) ** power - 1) < 1e-12
        ):
            return power
    raise NotCapturable(f"a number is {value} at a size of {size}, and {other} at {other_size}")


def _same_constants(records: Sequence[Mapping[int, Tensor]]) -> Mapping[int, Tensor]:
    first = records[0]
    for record in records[1:]:
        if record.keys() != first.keys() or any(
            record[slot].shape != tensor.shape or not torch.equal(record[slot], tensor)
            for slot, tensor in first.items()
        ):
            raise NotCapturable("it makes tensors outside of PyTorch's operations that differ with the sizes")
    return first


def _source(
    operations: Sequence[_Operation], results: Sequence[_Slot], arguments: int, examples: int, constants: set[int]
) -> str:
    """The record as a Python function that lets go of each tensor after its last use."""
    alias = _aliases(operations)
    named = [alias.get(slot.index, slot.index) for slot in results]
    kept = _needed(operations, named, alias)
    last_use = {slot: at for at, index in enumerate(kept) for slot in _inputs(operations[index], alias)}
    lasting = {*range(arguments), *constants, *named}

    def text(value: Any) -> str:
        return _text(value, alias, constants)

    lines = [f"def run({', '.join(f't{i}' for i in range(arguments))}):"]
    lines.append(f"    K, B = t0.shape[0], t{examples}.shape[0]")
    for at, index in enumerate(kept):
        o = operations[index]
        call = ", ".join([*map(text, o.args), *(f"{name}={text(value)}" for name, value in o.kwargs.items())])
        names = ["_" if slot is None else f"t{slot}" for slot in o.results]
        left = names[0] if o.single else f"[{', '.join(names)}]" if names else "_"
        lines.append(f"    {left} = f{index}({call})")
        gone = [slot for slot, use in last_use.items() if use == at and slot not in lasting]
        gone += [slot for slot in o.results if slot is not None and slot not in last_use and slot not in lasting]
        if gone:
            lines.append(f"    del {', '.join(f't{slot}' for slot in sorted(set(gone)))}")
    lines.append(f"    return [{', '.join(text(_Slot(slot)) for slot in named)}]")
    return "\n".join(lines)


def _aliases(operations: Sequence[_Operation]) -> dict[int, int]:
    """Results that an operation's first argument may stand for; none where something is written into."""
    alias: dict[int, int] = {}
    if any(o.function._schema.is_mutable for o in operations):
        return alias
    for o in operations:
        name = str(o.function)
        same = name in ALIASES or (
            o.like_input and (name in RESHAPES or (name == "aten.mul.Scalar" and o.args[1] == 1))
        )
        if same and isinstance(o.args[0], _Slot) and o.results[0] is not None:
            alias[o.results[0]] = alias.get(o.args[0].index, o.args[0].index)
    return alias


def _needed(operations: Sequence[_Operation], named: Sequence[int], alias: Mapping[int, int]) -> list[int]:
    """Which operations the results depend on, those that write, and those that draw random numbers."""
    wanted, kept = set(named), []
    for index in reversed(range(len(operations))):
        o = operations[index]
        if o.results and o.results[0] in alias:
            continue
        acts = o.function._schema.is_mutable or torch.Tag.nondeterministic_seeded in o.function.tags
        if acts or not wanted.isdisjoint(o.results):
            kept.append(index)
            wanted.update(_inputs(o, alias))
    return kept[::-1]


def _inputs(operation: _Operation, alias: Mapping[int, int]) -> list[int]:
    leaves = tree_flatten((operation.args, operation.kwargs), is_leaf=lambda value: isinstance(value, (_Slot, _Size)))[
        0
    ]
    return [alias.get(leaf.index, leaf.index) for leaf in leaves if isinstance(leaf, _Slot)]


def _text(value: Any, alias: Mapping[int, int], constants: set[int]) -> str:
    """An argument as Python."""
    if isinstance(value, _Slot):
        slot = alias.get(value.index, value.index)
        return f"c{slot}" if slot in constants else f"t{slot}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, alias, constants) for item in value)}]"
    if isinstance(value, _Size):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, *_TORCH_VALUES)):
        return repr(value)
    raise NotCapturable(f"an operation takes a {type(value).__name__}")


_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
