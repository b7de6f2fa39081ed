"""Each lane of a stack gives what its trial gives alone; what cannot be stacked says so, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Resident
from tuner.dropout import with_tensor_rates
from tuner.stack import Stack
from tuner.train import SGD, EpochResult, Job, Lone, Task, Trainer

CPU = torch.device("cpu")
EPOCHS = 3

torch.set_num_threads(1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def task_of(inputs: Any = None, target: Tensor | None = None, metrics: Any = None) -> Task:
    """75 examples of 12 numbers in three classes, so that no batch size divides them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(75, 12, generator=generator) if inputs is None else inputs
    y = torch.randint(0, 3, (75,), generator=generator) if target is None else target
    source = Resident((x, y), CPU)
    return Task(source, source, {"accuracy": accuracy} if metrics is None else metrics, EPOCHS, CPU)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def job(number: int, model: Callable[[], nn.Module] = mlp, loss: Any = None, **sgd: Any) -> Job:
    settings = {"lr": 0.05 + 0.01 * number, "batch_size": 8, "momentum": 0.5, **sgd}
    return Job(number, model, loss or nn.functional.cross_entropy, SGD(**settings), seed=1)


def train(trainers: list[Trainer], epochs: int = EPOCHS) -> dict[int, list[EpochResult]]:
    found: dict[int, list[EpochResult]] = {}
    for trainer in trainers:
        for _ in range(epochs):
            for result in trainer.epoch(Stopwatch()):
                found.setdefault(result.number, []).append(result)
    return found


def assert_like_alone(jobs: list[Job], task: Task, stacked: int | None = None, reason: str = "") -> None:
    """The assembled trials give their lone results; `stacked` of them are in stacks (all, if not said)."""
    made = Assembler(task).assemble(jobs, 64)
    assert not made.errors
    together = sum(len(t.numbers) for t in made.trainers if isinstance(t, Stack))
    assert together == (len(jobs) if stacked is None else stacked), made.notices
    assert len(made.notices) == (1 if reason else 0), made.notices
    assert reason in " ".join(made.notices)
    found = train(made.trainers)
    for one in jobs:
        for mine, alone in zip(found[one.number], train([Lone(one, task)])[one.number], strict=True):
            assert mine.epoch == alone.epoch
            assert mine.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
            assert mine.validation == pytest.approx(alone.validation, rel=1e-4)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "one batch size": [{}] * 5,
    "no momentum beside momentum": [{"momentum": m} for m in (0.0, 0.3, 0.95)],
    "weight decay": [{"weight_decay": w} for w in (0.0, 1e-4, 0.1)],
    "dampening": [{"dampening": d} for d in (0.0, 0.4, 0.9)] + [{"momentum": 0.0, "dampening": 0.5}],
    "nesterov": [{"nesterov": True, "momentum": 0.9}, {"momentum": 0.9}, {"nesterov": True, "weight_decay": 0.01}],
    "schedules": [
        {"schedule": name, "warmup_epochs": warm, "step_epochs": 1.0}
        for name in ("constant", "cosine", "step", "one-cycle")
        for warm in (0.0, 1.0)
    ],
    "batch sizes": [{"batch_size": b} for b in (4, 8, 16, 4, 32, 16)],
    "batch sizes and all the rest": [
        {"batch_size": 8, "nesterov": True, "weight_decay": 0.01},
        {"batch_size": 16, "dampening": 0.3, "schedule": "cosine"},
        {"batch_size": 64, "momentum": 0.0, "weight_decay": 0.1},
        {"batch_size": 128, "schedule": "one-cycle", "dampening": 0.2},
    ],
    "batches larger than the data": [{"batch_size": b} for b in (75, 150, 300)],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_lane_gives_what_its_trial_gives_alone(settings: list[dict[str, Any]]) -> None:
    """Losses and metrics of every epoch agree, with the settings of each lane its own."""
    assert_like_alone([job(number, **one) for number, one in enumerate(settings)], task_of())


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_and_grouped_batch_sizes_give_the_same(mixed: bool) -> None:
    """Few lanes are mixed in one stack, many are grouped by batch size; each agrees with its trial alone."""
    count = 8 if mixed else 20
    jobs = [job(number, batch_size=(8, 16, 32)[number % 3]) for number in range(count)]
    made = Assembler(task_of()).assemble(jobs, 64)
    assert len(made.trainers) == (1 if mixed else 3)
    assert_like_alone(jobs, task_of())


def test_batch_sizes_that_do_not_divide_each_other_are_grouped() -> None:
    """6 and 10 have no common stream of micro-batches: each makes a stack of its own."""
    jobs = [job(number, batch_size=(6, 10)[number % 2]) for number in range(4)]
    assert len(Assembler(task_of()).assemble(jobs, 64).trainers) == 2
    assert_like_alone(jobs, task_of())


def test_a_diverged_lane_changes_no_other_by_a_bit() -> None:
    """The same stack with a learning rate of 1e38 in one lane gives the others bit-equal losses."""
    calm = [job(number) for number in range(4)]
    wild = [job(number, lr=1e38) if number == 2 else calm[number] for number in range(4)]
    first, second = (train(Assembler(task_of()).assemble(jobs, 64).trainers) for jobs in (calm, wild))
    assert not torch.isfinite(torch.tensor(second[2][-1].train_loss))
    for number in (0, 1, 3):
        ours, theirs = ([(r.train_loss, r.validation) for r in found[number]] for found in (first, second))
        assert ours == theirs


@pytest.mark.parametrize("batch_sizes", [(8,), (8, 16, 32)])
def test_lanes_that_leave_change_no_other(batch_sizes: tuple[int, ...]) -> None:
    """After half of the lanes have left, the others go on as if alone, and the weights are those of their trials."""
    task = task_of()
    jobs = [job(n, batch_size=batch_sizes[n % len(batch_sizes)], nesterov=n % 2 == 0) for n in range(6)]
    (stack,) = Assembler(task).assemble(jobs, 64).trainers
    found = train([stack], 1)
    stack.leave([0, 3, 5])
    assert sorted(stack.numbers) == [1, 2, 4]
    later = train([stack], 2)
    for number in (1, 2, 4):
        lone = Lone(jobs[number], task)
        alone = train([lone])[number]
        mine = found[number] + later[number]
        assert [r.train_loss for r in mine] == pytest.approx([r.train_loss for r in alone], rel=1e-4)
        for name, tensor in lone.weights(number).items():
            torch.testing.assert_close(stack.weights(number)[name], tensor, rtol=1e-3, atol=1e-5)
    stack.leave([1, 2, 4])
    assert list(stack.numbers) == []


class Flag(nn.Module):
    """A number that `forward` reads."""

    def __init__(self, slope: float = 0.1, kind: str = "tanh") -> None:
        super().__init__()
        self.first, self.second, self.slope, self.kind = nn.Linear(12, 8), nn.Linear(8, 3), slope, kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.tanh(x) if self.kind == "tanh" else nn.functional.leaky_relu(x, self.slope)
        return self.second(x)


class Classwide(Flag):
    """A class attribute, which every instance shares."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Buffered(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.head, self.unused = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(4, 4)
        self.features.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(x)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x) if self.training else x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x.reshape(-1, 4, 3))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed((x.abs() * 3).long().clamp(max=6))
        return self.out(self.attend(e, e, e)[0].mean(dim=1))


class Evaluating(nn.Module):
    """Its batch norm stays in evaluation mode whatever it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def train(self, mode: bool = True) -> Evaluating:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def normed(p: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3))


def convolution() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


STACKABLE: dict[str, Callable[[], nn.Module]] = {
    "a flag": Flag,
    "a class attribute": Classwide,
    "tied weights": Tied,
    "a buffer": Buffered,
    "frozen and unused parameters": Frozen,
    "random numbers": Noisy,
    "batch norm": normed,
    "batch norm in evaluation mode": Evaluating,
    "convolution": convolution,
    "attention over an embedding": Attention,
}


@pytest.mark.parametrize("model", STACKABLE.values(), ids=STACKABLE)
@pytest.mark.parametrize("batch_sizes", [(8,), (8, 16)], ids=["one size", "two sizes"])
def test_a_model_of_this_kind_stacks_right(model: Callable[[], nn.Module], batch_sizes: tuple[int, ...]) -> None:
    """Four trials with it agree with the lone ones; batches are mixed only where that changes nothing."""
    jobs = [job(number, model, batch_size=batch_sizes[number % len(batch_sizes)]) for number in range(4)]
    assert_like_alone(jobs, task_of())


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Branching, "data-dependent control flow"), (Recurrent, "vmap cannot do it")],
    ids=["branches", "LSTM"],
)
def test_a_model_that_cannot_be_stacked_runs_alone_and_says_why_once(model: Any, reason: str) -> None:
    """All of its trials are lone, and one line has the reason."""
    assert_like_alone([job(number, model) for number in range(4)], task_of(), stacked=0, reason=reason)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "another slope": (lambda: Flag(0.1, "leaky"), lambda: Flag(0.2, "leaky")),
    "another flag": (lambda: Flag(0.1, "leaky"), lambda: Flag(0.1, "tanh")),
    "another activation": (
        lambda: nn.Sequential(nn.Linear(12, 3), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(12, 3), nn.Sigmoid()),
    ),
    "another order": (
        lambda: nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.ReLU(), nn.Linear(12, 3)),
        lambda: nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Tanh(), nn.Linear(12, 3)),
    ),
    "another epsilon": (
        lambda: nn.Sequential(nn.LayerNorm(12, eps=1e-5), nn.Linear(12, 3)),
        lambda: nn.Sequential(nn.LayerNorm(12, eps=1e-1), nn.Linear(12, 3)),
    ),
    "another function": (
        lambda: Applied(torch.tanh),
        lambda: Applied(torch.sigmoid),
    ),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(12, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("models", DIFFERENT.values(), ids=DIFFERENT)
def test_equal_shapes_with_a_difference_are_two_stacks(models: tuple[Callable[[], nn.Module], ...]) -> None:
    """Trials whose networks differ in a setting that is no tensor do not share a stack, and each is right."""
    jobs = [job(number, models[number % 2]) for number in range(6)]
    assert len(Assembler(task_of()).assemble(jobs, 64).trainers) == 2
    assert_like_alone(jobs, task_of())


def test_dropout_at_different_rates_shares_a_stack() -> None:
    """Rates of 0, 0.3 and 0.8 in one stack: each lane drops what it drops alone."""
    jobs = [job(number, lambda p=rate: normed(p)) for number, rate in enumerate((0.0, 0.3, 0.8))]
    assert len(Assembler(task_of()).assemble(jobs, 64).trainers) == 1
    assert_like_alone(jobs, task_of())
    losses = {number: rows[-1].train_loss for number, rows in train([Lone(j, task_of()) for j in jobs]).items()}
    assert len(set(losses.values())) == 3


def test_buffers_may_differ_between_lanes() -> None:
    """A buffer is a tensor, so each lane has its own."""
    jobs = [job(number, lambda s=scale: Buffered(s)) for number, scale in enumerate((0.5, 1.0, 3.0))]
    assert len(Assembler(task_of()).assemble(jobs, 64).trainers) == 1
    assert_like_alone(jobs, task_of())


def test_a_difference_that_no_signature_sees_is_found_by_the_probe() -> None:
    """A global that changes between two models' making: the lanes are compared with their networks, and run alone."""
    state = {"factor": 1.0}

    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            state["factor"] += 1.0
            return self.layer(x) * state["factor"]

    made = Assembler(task_of()).assemble([job(number, Global) for number in range(3)], 64)
    assert all(isinstance(trainer, Lone) for trainer in made.trainers)
    assert len(made.notices) == 1


def test_float64_and_several_inputs_stack() -> None:
    """A model of double precision, with a pair or a dictionary of inputs and a dictionary as output."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 3, dtype=torch.float64), nn.Linear(2, 3, dtype=torch.float64)

        def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
            return {"scores": self.a(x) + self.b(z)}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output["scores"], target)

    generator = torch.Generator().manual_seed(6)
    x, z = (torch.randn(75, n, generator=generator, dtype=torch.float64) for n in (12, 2))
    for inputs in ((x, z), {"x": x, "z": z}):
        task = task_of(inputs, metrics={})
        assert_like_alone([job(n, Pair, loss, batch_size=(8, 16)[n % 2]) for n in range(4)], task)


def test_a_loss_that_is_no_mean_over_examples_is_not_split() -> None:
    """A loss with a maximum over the batch: batch sizes are grouped, and agree."""

    def worst(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none").max()

    jobs = [job(number, mlp, worst, batch_size=(8, 16)[number % 2]) for number in range(4)]
    assert len(Assembler(task_of()).assemble(jobs, 64).trainers) == 2
    assert_like_alone(jobs, task_of())


def test_a_metric_that_reads_a_value_makes_its_trials_run_alone() -> None:
    """`.item()` in a metric cannot be recorded; the trials run alone and their metrics are right."""

    def reads(output: Tensor, target: Tensor) -> float:
        return float((output.argmax(dim=1) == target).float().mean().item())

    assert_like_alone([job(n) for n in range(3)], task_of(metrics={"share": reads}), stacked=0, reason="trained alone")


def test_dropout_drops_and_scales_as_pytorchs_does() -> None:
    """In training a share p is zero and the rest is 1 / (1 - p); p = 1 gives zeros; in evaluation nothing changes."""
    x = torch.ones(100_000)
    for p in (0.0, 0.25, 0.9, 1.0):
        layer = with_tensor_rates(nn.Sequential(nn.Dropout(p)))
        assert layer.state_dict() == {}
        out = layer.train()(x)
        assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.01)
        assert torch.all((out == 0) | torch.isclose(out, torch.tensor(1 / (1 - p) if p < 1 else 0.0)))
        assert torch.equal(layer.eval()(x), x)


class Counting(nn.Module):
    """Halves its output after some calls, as a schedule in a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(12, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x) * (1.0 if self.calls < 12 else 0.5)


class Rebinding(nn.Module):
    """Assigns a new tensor to its buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(dim=0)
        return y + self.average


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * (1.0 if self.calls % 2 else 0.5)


@pytest.mark.parametrize("model", [Counting, Rebinding])
def test_a_forward_pass_with_a_memory_of_its_own_runs_alone_from_a_fresh_network(model: Any) -> None:
    """What no record repeats is found, and the comparison that found it leaves no trace in the trials."""
    jobs = [job(number, model) for number in range(4)]
    made = Assembler(task_of()).assemble(jobs, 64)
    assert all(isinstance(trainer, Lone) for trainer in made.trainers)
    assert len(made.notices) == 1
    found = train(made.trainers)
    for one in jobs:
        assert [r.train_loss for r in found[one.number]] == [
            r.train_loss for r in train([Lone(one, task_of())])[one.number]
        ]


def test_a_loss_that_counts_its_calls_is_not_stacked() -> None:
    """Its attribute changes with each call, so its trials run alone, and one line says why."""
    loss = CountingLoss()
    made = Assembler(task_of()).assemble([job(number, mlp, loss) for number in range(3)], 64)
    assert all(isinstance(trainer, Lone) for trainer in made.trainers)
    assert len(made.notices) == 1


def test_trials_of_their_own_structure_say_what_keeps_them_apart() -> None:
    """One line names the difference; it is not repeated."""
    assembler = Assembler(task_of())
    jobs = [job(n, lambda width=n + 2: nn.Sequential(nn.Linear(12, width), nn.Linear(width, 3))) for n in range(4)]
    notice = "4 of 4 trials are trained alone, not in a stack: they differ in the shapes of their weights"
    assert assembler.assemble(jobs, 64).notices == [notice]
    assert assembler.assemble(jobs, 64).notices == []
    slopes = [job(n, lambda slope=n / 10: Flag(slope, "leaky")) for n in range(3)]
    (notice,) = Assembler(task_of()).assemble(slopes, 64).notices
    assert notice.endswith("they differ in the settings of the network (Flag)")


def test_pythons_and_numpys_generators_are_seeded_too() -> None:
    """A model that draws from them gives the same losses twice."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 + 0.1 * random.random() + 0.1 * numpy.random.random())

    first, second = (train([Lone(job(0, Drawing), task_of())])[0] for _ in range(2))
    assert [r.train_loss for r in first] == [r.train_loss for r in second]


class Remembering(nn.Module):
    """Its output depends on how often it was called, also in evaluation, and no record can repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(12, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        y = self.layer(x) * (1 + 0.001 * self.seen)
        return y if float(y.detach().sum()) > 0 else 1.1 * y


def test_recording_a_network_leaves_no_trace_in_its_trial() -> None:
    """The first trial of a kind, whose network is looked at most, gives what it gives alone."""
    jobs = [job(number, Remembering) for number in range(3)]
    made = Assembler(task_of()).assemble(jobs, 64)
    assert all(isinstance(trainer, Lone) for trainer in made.trainers)
    found = train(made.trainers)
    for one in jobs:
        alone = train([Lone(one, task_of())])[one.number]
        assert [r.train_loss for r in found[one.number]] == [r.train_loss for r in alone]
