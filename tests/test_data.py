"""Where examples live, in what order they come, and what a study file may return as its data."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tuner.clock import Stopwatch
from tuner.data import CHUNK_BYTES, Resident, Source, Splits, Streamed, _ahead, digest, epoch_order, prepare
from tuner.errors import SpecError
from tuner.train import SGD, Job, Lone, Task

CPU = torch.device("cpu")


def examples(count: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 5, generator=generator), torch.arange(count) % 3


class Rows(Dataset[Any]):
    """A map-style data set: its examples are made one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def trained(source: Source) -> tuple[list[Any], dict[str, Tensor]]:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    lone = Lone(
        Job(0, model, nn.functional.cross_entropy, SGD(0.1, 4, momentum=0.9), seed=1),
        Task(source, source, {}, 3, CPU),
    )
    watch = Stopwatch()
    results = [result for _ in range(3) for result in lone.epoch(watch)]
    return [(r.train_loss, dict(r.validation), r.samples) for r in results], lone.weights(0)


@pytest.mark.parametrize("kind", ["tensors", "data set"])
def test_streamed_training_is_resident_training_bit_for_bit(kind: str) -> None:
    """Where the examples lie changes no bit of what is learned, dropout included."""
    x, y = examples()
    streamed = Streamed((x, y) if kind == "tensors" else Rows(x, y), CPU)
    results, weights = trained(Resident((x, y), CPU))
    same_results, same_weights = trained(streamed)
    assert results == same_results
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


@pytest.mark.parametrize("batch_size", [1, 4, 23, 100])
@pytest.mark.parametrize("kind", ["resident", "streamed", "data set"])
def test_every_example_comes_once_an_epoch_in_the_order_asked_for(kind: str, batch_size: int) -> None:
    """Batches are the order cut into pieces; the last may be smaller, and none is left out."""
    x, y = examples()
    source: Source = {
        "resident": lambda: Resident((x, y), CPU),
        "streamed": lambda: Streamed((x, y), CPU),
        "data set": lambda: Streamed(Rows(x, y), CPU),
    }[kind]()
    assert source.size == 23
    for order in (epoch_order(23, 0, 1), None):
        batches = list(source.batches(batch_size, order))
        assert [len(target) for _, target in batches] == [
            min(batch_size, 23 - start) for start in range(0, 23, batch_size)
        ]
        chosen = torch.arange(23) if order is None else order
        assert torch.equal(torch.cat([inputs for inputs, _ in batches]), x[chosen])
        assert torch.equal(torch.cat([target for _, target in batches]), y[chosen])


def test_examples_larger_than_a_chunk_come_in_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering in parts does not cut a batch in two."""
    assert CHUNK_BYTES > 1 << 20
    x, y = examples()
    order = epoch_order(23, 0, 0)
    whole = list(Resident((x, y), CPU).batches(4, order))
    for chunk in (1, 100, 250):
        monkeypatch.setattr("tuner.data.CHUNK_BYTES", chunk)
        for wanted, found in zip(whole, Resident((x, y), CPU).batches(4, order), strict=True):
            assert torch.equal(wanted[0], found[0])
            assert torch.equal(wanted[1], found[1])


def test_the_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() -> None:
    """Equal seed and epoch give equal orders; another seed or epoch gives another; each holds every example once."""
    orders = {(seed, epoch): epoch_order(50, seed, epoch) for seed in (0, 1, 7) for epoch in range(4)}
    assert len({tuple(order.tolist()) for order in orders.values()}) == len(orders)
    for (seed, epoch), order in orders.items():
        torch.rand(3)
        assert torch.equal(epoch_order(50, seed, epoch), order)
        assert sorted(order.tolist()) == list(range(50))


def test_a_dictionary_of_inputs_keeps_its_names_in_every_batch() -> None:
    """Inputs and targets may be trees of tensors; each batch has the same tree."""
    x, y = examples()
    split = ({"a": x, "b": (x[:, 0], y)}, [y])
    (first, *_) = Resident(split, CPU).batches(4)
    (same, *_) = Streamed(split, CPU).batches(4)
    for inputs, target in (first, same):
        assert torch.equal(inputs["a"], x[:4])
        assert torch.equal(inputs["b"][1], y[:4])
        assert torch.equal(target[0], y[:4])


def test_what_a_data_loader_takes_is_taken() -> None:
    """Tensors, a TensorDataset, a loader of one and a list of two are resident; a data set of examples is streamed."""
    x, y = examples()
    for split in ((x, y), [x, y], TensorDataset(x, y), DataLoader(TensorDataset(x, y))):
        data = prepare(Splits(split, split), CPU, "here")
        assert data.train.resident
        assert data.notes == ()
        assert torch.equal(next(iter(data.train.batches(3)))[0], x[:3])
    data = prepare(Splits(Rows(x, y), (x, y)), CPU, "here")
    assert (data.train.resident, data.validation.resident) == (False, True)
    assert len(data.notes) == 1
    assert "train data are streamed" in data.notes[0]


def test_tensors_that_do_not_fit_are_streamed_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little room on the device everything is streamed, with the size in a note."""
    monkeypatch.setattr("tuner.data.free_bytes", lambda device: 100)
    data = prepare(Splits(examples(), examples()), CPU, "here")
    assert not data.train.resident
    assert not data.validation.resident
    assert [note.partition(" data are streamed to the device: ")[0] for note in data.notes] == ["train", "validation"]
    assert all("GB do not fit" in note for note in data.notes)


class Unread:
    """A test split that must not be touched."""

    def __len__(self) -> int:
        raise AssertionError("the test split was read")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the test split was read")


def test_the_test_split_is_not_read() -> None:
    """The search does not even look at it."""
    assert isinstance(prepare(Splits(examples(), examples(), Unread()), CPU, "here").test, Unread)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Broken(Rows):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such picture")


X, Y = examples()
WRONG = {
    "None": (None, ["a Dataset", "None"]),
    "a number": (3, ["a Dataset", "int"]),
    "one tensor": (X, ["a Dataset", "a tensor of shape (23, 5)"]),
    "three tensors": ((X, Y, Y), ["a Dataset", "tuple"]),
    "numpy": ((X.numpy(), Y.numpy()), ["tensors", "numpy.ndarray"]),
    "no tensors": (({}, []), ["tensors", "nothing"]),
    "a tensor without dimensions": ((torch.tensor(1.0), torch.tensor(2)), ["tensors"]),
    "different lengths": ((X, Y[:-1]), ["different lengths", "22, 23"]),
    "empty tensors": ((X[:0], Y[:0]), ["is empty"]),
    "an empty data set": (Rows(X[:0], Y[:0]), ["is empty"]),
    "an iterable data set": (Stream(), ["with a length"]),
    "a data set of single tensors": (TensorDataset(X), ["pairs (input, target)"]),
    "a data set of triples": (TensorDataset(X, X, Y), ["pairs (input, target)"]),
    "a data set that raises": (Broken(X, Y), ["KeyError", "no such picture"]),
}


@pytest.mark.parametrize("which", ["train", "validation"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_split_is_one_line_that_names_file_and_split(kind: str, which: str) -> None:
    """What was wanted and what was found, for each way in which a split can be wrong."""
    split, words = WRONG[kind]
    splits = Splits(split, (X, Y)) if which == "train" else Splits((X, Y), split)
    with pytest.raises(SpecError) as caught:
        prepare(splits, CPU, "some/file.py")
    message = str(caught.value)
    assert message.startswith(f"some/file.py: the {which} split ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("found", [None, (X, Y), {"train": X}])
def test_data_that_are_no_splits_are_refused(found: Any) -> None:
    """`data` returns Splits, nothing else."""
    with pytest.raises(SpecError, match=r"^some/file\.py: data\(\) must return tuner\.Splits"):
        prepare(found, CPU, "some/file.py")


def test_the_digest_changes_with_a_single_value() -> None:
    """One value, its place, a type or a shape: the data are others, and equal data have equal digests."""
    seen = {digest([(X, Y)])}
    for changed in (X.clone(), X.clone()):
        changed[11, 2] += 1e-6 if len(seen) == 1 else 2e-6
        seen.add(digest([(changed, Y)]))
    labels = Y.clone()
    labels[-1] += 1
    swapped = X[torch.tensor([1, 0, *range(2, 23)])]
    for parts in ([(X, labels)], [(swapped, Y)], [(X.double(), Y)], [(X.reshape(23, 5, 1), Y)], [(X, Y), (X, Y)]):
        seen.add(digest(parts))
    assert len(seen) == 8
    assert digest([(X.clone(), Y.clone())]) in seen
    assert digest([Rows(X, Y)]) != digest([Rows(X[:5], Y[:5])])
    assert digest([(X.bfloat16(), Y.bool())]) == digest([(X.bfloat16(), Y.bool())])


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tuner-prefetch"]


def wait_until_none() -> None:
    deadline = time.monotonic() + 20
    while prefetchers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert prefetchers() == []


def test_what_is_read_ahead_is_what_was_read() -> None:
    """Order and number of batches are kept, and the thread ends with them."""
    assert list(_ahead(((number, None) for number in range(20)), depth=2)) == [(number, None) for number in range(20)]
    wait_until_none()


def test_reading_ahead_stays_within_its_depth() -> None:
    """No more batches wait in memory than were allowed: the queue, one in hand, and the one that is being used."""
    made = []

    def batches() -> Iterator[Any]:
        for number in range(50):
            made.append(number)
            yield number, None

    reader = _ahead(batches(), depth=2)
    assert next(reader) == (0, None)
    time.sleep(0.3)
    assert len(made) <= 4
    reader.close()  # type: ignore[attr-defined]
    wait_until_none()


def test_an_error_while_reading_ahead_reaches_the_caller() -> None:
    """The batches before it come first, then the error itself, and the thread is gone."""

    def batches() -> Iterator[Any]:
        yield 1, None
        raise OSError("the disk is gone")

    found: list[Any] = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(_ahead(batches(), depth=2))
    assert found == [(1, None)]
    wait_until_none()


def test_the_reader_ends_when_its_consumer_stops_early() -> None:
    """A trial that fails in mid-epoch leaves no thread behind."""
    reader = _ahead(((number, None) for number in range(1000)), depth=2)
    next(reader)
    assert len(prefetchers()) == 1
    reader.close()  # type: ignore[attr-defined]
    wait_until_none()
