"""The examples of a study, where the training finds them fastest.

Tensors that fit go to the device once per process and are read there by index (`Resident`). What does not fit, or is a
data set that makes its examples one by one, comes in parts (`Streamed`): the next part is read and copied from pinned
memory while the device works on this one.

An example is a pair (input, target). Either may be a tensor, or a tuple, list or dictionary of tensors; the first
dimension counts examples. Legend of names: N examples, B batch.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tuner.device import free_bytes
from tuner.errors import SpecError

Batch = tuple[Any, Any]

CHUNK_BYTES = 1 << 25
"""Resident examples are gathered in this many bytes at a time: one large gather and views of it cost less than many
small ones, and a copy of a whole large data set would not fit beside it."""

RESIDENT_SHARE = 0.5
"""Data sets are kept on an accelerator when they take less than this share of its free memory."""

DIGEST_BYTES = 1 << 26
"""At most this much of each tensor goes into a digest, evenly spread: seconds matter at every start."""


@dataclass(frozen=True)
class Splits:
    """The three parts of a study's data; the search never reads `test`.

    Each is a pair (inputs, targets) of tensors (or of tuples or dictionaries of tensors) with the same first dimension,
    or a map-style ``torch.utils.data.Dataset`` whose items are pairs (input, target).
    """

    train: Any
    validation: Any
    test: Any = None


class Source(Protocol):
    """Examples to train or evaluate on."""

    size: int
    resident: bool

    def batches(self, batch_size: int, order_N: Tensor | None = None) -> Iterator[Batch]:
        """Yield (input, target) on the device in `order_N` (as stored without one); the last batch may be smaller."""


@dataclass(frozen=True)
class Data:
    """What the search trains and validates on; `test` stays as the study file gave it, unread."""

    train: Source
    validation: Source
    test: Any
    digest: str
    notes: tuple[str, ...] = ()


class Resident:
    """Tensors that live on the device."""

    resident = True

    def __init__(self, examples: Batch, device: torch.device) -> None:
        leaves, self._structure = tree_flatten(examples)
        self._leaves = [leaf.to(device) for leaf in leaves]
        self._device = device
        self.size = len(self._leaves[0])
        self._example_bytes = max(1, sum(_bytes(leaf) for leaf in leaves) // self.size)

    @property
    def examples(self) -> Batch:
        """All (inputs, targets), on the device, as stored."""
        return _pair(tree_unflatten(self._leaves, self._structure))

    def batches(self, batch_size: int, order_N: Tensor | None = None) -> Iterator[Batch]:
        part = max(1, CHUNK_BYTES // (self._example_bytes * batch_size)) * batch_size
        order_N = None if order_N is None else order_N.to(self._device)
        for start in range(0, self.size, part):
            if order_N is None:
                # Copies, as a data loader gives them: a model may change its input in place.
                leaves = [leaf[start : start + part].clone() for leaf in self._leaves]
            else:
                chosen = order_N[start : start + part]
                leaves = [leaf.index_select(0, chosen) for leaf in self._leaves]
            for pieces in zip(*(leaf.split(batch_size) for leaf in leaves), strict=True):
                yield _pair(tree_unflatten(list(pieces), self._structure))


class Streamed:
    """Examples that come to the device in batches, the next ones while it works."""

    resident = False

    def __init__(self, examples: Batch | Dataset[Any], device: torch.device) -> None:
        self._examples = examples
        self._device = device
        self.size = len(tree_flatten(examples)[0][0]) if isinstance(examples, tuple) else len(_sized(examples))

    def batches(self, batch_size: int, order_N: Tensor | None = None) -> Iterator[Batch]:
        order_N = torch.arange(self.size) if order_N is None else order_N
        batches = self._read(order_N.split(batch_size), pin=self._device.type == "cuda")
        if self._device.type == "cpu":
            # No thread: a data set that draws random numbers shares the CPU's generator with the model's dropout, and
            # two threads would draw in an order that no seed repeats.
            return batches
        return _ahead(map(self._copy, batches), depth=2)

    def _read(self, chosen: Sequence[Tensor], pin: bool) -> Iterator[Batch]:
        examples = self._examples
        if not isinstance(examples, tuple):
            sampler = [c.tolist() for c in chosen]
            # A generator of its own: a loader draws a seed for its workers, from the one that dropout uses otherwise.
            yield from map(
                _pair, DataLoader(examples, batch_sampler=sampler, pin_memory=pin, generator=torch.Generator())
            )
            return
        for indices_B in chosen:
            leaves, structure = tree_flatten(examples)
            chosen_B = [leaf.index_select(0, indices_B) for leaf in leaves]
            yield _pair(tree_unflatten([leaf.pin_memory() for leaf in chosen_B] if pin else chosen_B, structure))

    def _copy(self, batch: Batch) -> Batch:
        return _pair(tree_map_only(Tensor, lambda x: x.to(self._device, non_blocking=True), batch))


def prepare(splits: Any, device: torch.device, origin: str) -> Data:
    """Check what a study file's `data` returned, and put it where it is read fastest.

    `origin` names the study file in errors. Raises `SpecError`.
    """
    if not isinstance(splits, Splits):
        raise SpecError(f"{origin}: data() must return tuner.Splits(train, validation, test), not {_kind(splits)}")
    parts = {name: _examples(getattr(splits, name), f"{origin}: the {name} split") for name in ("train", "validation")}
    room = free_bytes(device)
    needed = sum(_bytes(leaf) for part in parts.values() if isinstance(part, tuple) for leaf in tree_flatten(part)[0])
    fits = room is None or needed <= RESIDENT_SHARE * room
    sources: dict[str, Source] = {}
    notes = []
    for name, part in parts.items():
        if isinstance(part, tuple) and fits:
            sources[name] = Resident(part, device)
        else:
            sources[name] = Streamed(part, device)
            why = f"{needed / 1e9:.1f} GB do not fit" if isinstance(part, tuple) else "a data set of single examples"
            notes.append(f"{name} data are streamed to the device: {why}")
    return Data(sources["train"], sources["validation"], splits.test, digest(list(parts.values())), tuple(notes))


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch reads its `size` examples: the same for every trial of the same seed and age.

    That all trials share it is what lets a stack read each micro-batch once for all its lanes.
    """
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch of a trial, so that an epoch does not depend on what was drawn before it."""
    return (seed * 1_000_003 + epoch) % (1 << 63)


def digest(parts: list[Any]) -> str:
    """A short digest of tensors (values, shapes, types), or of a data set's type and length."""
    state = hashlib.sha256()
    for part in parts:
        if not isinstance(part, tuple):
            state.update(f"{type(part).__qualname__} {len(_sized(part))}".encode())
            continue
        for leaf in tree_flatten(part)[0]:
            state.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            stride = max(1, _bytes(leaf) // DIGEST_BYTES)
            state.update(leaf.detach().cpu()[::stride].contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()[:16]


def _examples(split: Any, what: str) -> Any:
    """A pair of pytrees of tensors, or a map-style data set; checked."""
    if isinstance(split, DataLoader):
        split = split.dataset
    if isinstance(split, TensorDataset) and len(split.tensors) == 2:
        split = split.tensors
    if isinstance(split, (tuple, list)) and len(split) == 2:
        pair = tuple(split)
        leaves = tree_flatten(pair)[0]
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
            kinds = ", ".join(sorted({_kind(leaf) for leaf in leaves})) or "nothing"
            raise SpecError(
                f"{what} must be (inputs, targets) of tensors with examples first, or a Dataset; found {kinds}"
            )
        sizes = sorted({len(leaf) for leaf in leaves})
        if len(sizes) > 1:
            raise SpecError(f"{what} has tensors of different lengths: {', '.join(map(str, sizes))} examples")
        if sizes == [0]:
            raise SpecError(f"{what} is empty")
        return pair
    if isinstance(split, IterableDataset) or not isinstance(split, Dataset) or not hasattr(split, "__len__"):
        raise SpecError(
            f"{what} must be (inputs, targets) of tensors, or a Dataset with a length; found {_kind(split)}"
        )
    if len(_sized(split)) == 0:
        raise SpecError(f"{what} is empty")
    try:
        example = split[0]
    except Exception as error:
        raise SpecError(f"{what} raised {type(error).__name__} for its first item: {error}") from error
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise SpecError(f"{what} must give pairs (input, target); its first item is {_kind(example)}")
    return split


def _ahead(batches: Iterable[Batch], depth: int) -> Iterator[Batch]:
    """The same batches, read by a thread that stays up to `depth` of them ahead."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                put(batch)
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=read, daemon=True, name="tuner-prefetch")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def _pair(batch: Any) -> Batch:
    first, second = batch
    return first, second


def _bytes(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()


def _sized(dataset: Any) -> Sized:
    assert isinstance(dataset, Sized)
    return dataset


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
