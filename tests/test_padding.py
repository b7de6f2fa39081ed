"""Trials of different widths share a stack, padded, and each gives what it gives alone; what cannot says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_stack import accuracy, train
from tuner.assemble import Assembler, Assembly
from tuner.clock import Stopwatch
from tuner.data import Resident
from tuner.padding import Form, form, wide_numbers, wide_sizes
from tuner.stack import Stack
from tuner.train import SGD, Job, Lone, Task
from tuner.widths import Choice, Member

CPU = torch.device("cpu")
EPOCHS = 4
WIDTHS = (3, 8, 17, 33)

torch.set_num_threads(1)


def task_of(planned_epochs: int = 1000, size: int = 75) -> Task:
    """75 examples of 12 numbers in three classes. So many epochs are planned that padding is worth its record."""
    generator = torch.Generator().manual_seed(5)
    source = Resident(
        (torch.randn(size, 12, generator=generator), torch.randint(0, 3, (size,), generator=generator)), CPU
    )
    return Task(source, source, {"accuracy": accuracy}, planned_epochs, CPU)


def mlp(width: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    other = 2 + width // 2
    layers = [nn.Linear(12, width), activation(), nn.Linear(width, other), activation(), nn.Linear(other, 3)]
    return nn.Sequential(*layers)


def job(number: int, model: Callable[[], nn.Module], **sgd: Any) -> Job:
    settings = {"lr": 0.05 + 0.01 * number, "batch_size": 8, "momentum": 0.5, **sgd}
    return Job(number, model, nn.functional.cross_entropy, SGD(**settings), seed=1)


def jobs_of(model: Callable[[int], nn.Module], widths: Sequence[int] = WIDTHS, **sgd: Any) -> list[Job]:
    return [job(number, lambda w=width: model(w), **sgd) for number, width in enumerate(widths)]


def stacked(made: Assembly) -> int:
    return sum(len(trainer.numbers) for trainer in made.trainers if isinstance(trainer, Stack))


def assert_like_alone(jobs: list[Job], together: int, task: Task | None = None) -> Assembly:
    """`together` of the trials are in stacks, and all give their lone results and weights in every epoch."""
    task = task or task_of()
    made = Assembler(task).assemble(jobs, 64)
    assert not made.errors
    assert stacked(made) == together, made.notices
    found = train(made.trainers, EPOCHS)
    for one in jobs:
        lone = Lone(one, task)
        for mine, alone in zip(found[one.number], train([lone], EPOCHS)[one.number], strict=True):
            assert mine.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
            assert mine.validation == pytest.approx(alone.validation, rel=1e-4)
        (trainer,) = (t for t in made.trainers if one.number in t.numbers)
        weights = trainer.weights(one.number)
        one.model().load_state_dict(weights, strict=True)
        for name, tensor in lone.weights(one.number).items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)
    for trainer in made.trainers:
        if isinstance(trainer, Stack):
            assert_zero_where_padded(trainer)
    return made


def assert_zero_where_padded(stack: Stack) -> None:
    assert stack._masks is not None
    assert sum(int((mask == 0).sum()) for mask in stack._masks) > 0
    for tensors in (stack._trained, stack._momenta):
        for tensor, mask in zip(tensors, stack._masks, strict=True):
            assert torch.all(tensor[mask == 0] == 0)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "one batch size": [{}] * 4,
    "batch sizes": [{"batch_size": b} for b in (8, 32, 4, 16)],
    "momentum": [{"momentum": m} for m in (0.0, 0.5, 0.9, 0.95)],
    "nesterov": [{"nesterov": n % 2 == 0, "momentum": 0.9, "weight_decay": 0.01} for n in range(4)],
    "weight decay": [{"weight_decay": w} for w in (0.0, 1e-4, 0.1, 0.01)],
    "dampening": [{"dampening": d} for d in (0.0, 0.4, 0.9, 0.1)],
    "schedules": [{"schedule": s, "warmup_epochs": 1.0} for s in ("constant", "cosine", "step", "one-cycle")],
    "all of it": [
        {"batch_size": 8, "nesterov": True, "weight_decay": 0.01},
        {"batch_size": 16, "dampening": 0.3, "schedule": "cosine"},
        {"batch_size": 64, "momentum": 0.0, "weight_decay": 0.1},
        {"batch_size": 128, "schedule": "one-cycle", "dampening": 0.2},
    ],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_padded_lane_gives_what_its_trial_gives_alone(settings: list[dict[str, Any]]) -> None:
    """Losses, metrics and weights agree in every epoch, with a sigmoid, whose value at zero is not zero."""
    jobs = [job(n, lambda w=WIDTHS[n]: mlp(w, nn.Sigmoid), **one) for n, one in enumerate(settings)]
    assert assert_like_alone(jobs, 4).notices == []


class Viewing(nn.Module):
    """Its width is a Python number that `forward` reads, once by itself and once in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.shape = width, [width, 2]
        self.first, self.last = nn.Linear(12, 2 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x).view(-1, *self.shape)).sum(dim=2)
        return self.last(x.reshape(len(x), self.width))


class Tied(nn.Module):
    """One weight in two layers, and once more transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.sigmoid(self.a(torch.tanh(self.first(x)))))
        return self.last(nn.functional.linear(torch.tanh(x), self.first.weight.t()))


class Table(nn.Module):
    """An embedding whose length differs; the ids are in all of the tables."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(length, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x.abs().long().clamp(max=2)).mean(dim=1))


class Frozen(nn.Module):
    """Frozen features, unused weights, and a buffer that is divided by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features, self.unused, self.last = nn.Linear(12, width), nn.Linear(width, 2), nn.Linear(width, 3)
        self.features.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(1, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cos(self.features(x)) / self.scale)


class Evaluating(nn.Module):
    """Its batch norm stays in evaluation mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, width), nn.BatchNorm1d(width), nn.Linear(width, 3)

    def train(self, mode: bool = True) -> Evaluating:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.norm(self.first(x))))


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.Sigmoid(), nn.Linear(width, 3))


def convolution(width: int) -> nn.Module:
    layers = [nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Conv2d(width, 2 * width, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12 * width, 3))


def depthwise(width: int) -> nn.Module:
    layers = [nn.Linear(12, 4 * width), nn.Unflatten(1, (width, 4)), nn.Conv1d(width, width, 3, groups=width)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width, 3))


RIGHT: dict[str, Callable[[int], nn.Module]] = {
    "ReLU": lambda w: mlp(w, nn.ReLU),
    "tanh": lambda w: mlp(w, nn.Tanh),
    "GELU": lambda w: mlp(w, nn.GELU),
    "softplus": lambda w: mlp(w, nn.Softplus),
    "a slope for each unit": lambda w: nn.Sequential(nn.Linear(12, w), nn.PReLU(w), nn.Linear(w, 3)),
    "views by a Python number": Viewing,
    "tied weights": Tied,
    "embedding tables of different lengths": Table,
    "frozen and unused weights": Frozen,
    "batch norm": normed,
    "batch norm in evaluation mode": Evaluating,
    "convolution": convolution,
    "depthwise convolution": depthwise,
}


@pytest.mark.parametrize("batch_sizes", [(8, 8), (8, 16)], ids=["one size", "two sizes"])
@pytest.mark.parametrize("model", RIGHT.values(), ids=RIGHT)
def test_a_model_of_this_kind_is_padded_right(model: Callable[[int], nn.Module], batch_sizes: tuple[int, int]) -> None:
    """Four widths of it are trained in stacks and agree with the lone trials."""
    widths = (3, 5, 9, 6)
    jobs = [job(n, lambda w=w: model(w), batch_size=batch_sizes[n % 2]) for n, w in enumerate(widths)]
    assert assert_like_alone(jobs, 4).notices == []


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(3, width), nn.MultiheadAttention(width, 1, batch_first=True)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x.reshape(-1, 4, 3))
        return self.last(self.attend(e, e, e)[0].mean(dim=1))


class Branch(nn.Module):
    """A layer norm in a branch that starts at zero: at first its loss is right in a padded network, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.branch = nn.Linear(12, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        for scale in (self.norm.weight, self.norm.bias, self.branch.weight, self.branch.bias):
            nn.init.zeros_(scale)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.branch(self.norm(x)))


class Function(nn.Module):
    def __init__(self, width: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(12, width), function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Evaluated(Function):
    """Only its evaluation depends on the width."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x).div(self.first.weight.shape[0])


def softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=1)


def centred(x: Tensor) -> Tensor:
    return x - (x + 1).mean(dim=1, keepdim=True)


def scaled(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[1])


def gated(x: Tensor) -> Tensor:
    return torch.cat([nn.functional.glu(x), x[:, : x.shape[1] // 2]], dim=1)


REFUSED: dict[str, Callable[[int], nn.Module]] = {
    "layer norm": lambda w: nn.Sequential(nn.Linear(12, w), nn.LayerNorm(w), nn.Linear(w, 3)),
    "a layer norm that does nothing at first": Branch,
    "softmax": lambda w: Function(w, softmax),
    "attention": Attending,
    "a mean over the width": lambda w: Function(w, centred),
    "a factor by the width": lambda w: Function(w, scaled),
    "a gate": lambda w: Function(w, gated),
    "dropout": lambda w: nn.Sequential(nn.Linear(12, w), nn.Dropout(0.3), nn.Linear(w, 3)),
    "another evaluation": lambda w: Evaluated(w, torch.tanh),
}


@pytest.mark.parametrize("model", REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_padded_is_trained_alone_and_says_why_once(model: Callable[[int], nn.Module]) -> None:
    """Its trials are trained from fresh networks, and one line says what the comparison found."""
    jobs = jobs_of(model, (4, 6, 10, 8))
    made = assert_like_alone(jobs, 0)
    (why, apart) = made.notices
    assert why.startswith("trials of different widths are not padded to share a stack: ")
    assert apart.endswith("trained alone, not in a stack: they differ in the shapes of their weights")
    assembler = Assembler(task_of())
    assert len(assembler.assemble(jobs, 64).notices) == 2
    assert assembler.assemble(jobs, 64).notices == []


def test_what_cannot_be_padded_still_shares_a_stack_with_its_like() -> None:
    """Pairs of equal shapes that were to join others in a padded stack are two stacks when that is refused."""
    widths = (4, 4, 6, 6, 10)
    jobs = jobs_of(lambda w: nn.Sequential(nn.Linear(12, w), nn.LayerNorm(w), nn.Linear(w, 3)), widths)
    assert len(assert_unmasked_like_alone(jobs, 4).notices) == 1


def assert_unmasked_like_alone(jobs: list[Job], together: int) -> Assembly:
    made = Assembler(task_of()).assemble(jobs, 64)
    assert stacked(made) == together, made.notices
    found = train(made.trainers, EPOCHS)
    for one in jobs:
        alone = train([Lone(one, task_of())], EPOCHS)[one.number]
        mine = [r.train_loss for r in found[one.number]]
        assert mine == pytest.approx([r.train_loss for r in alone], rel=1e-4)
    assert all(t._masks is None for t in made.trainers if isinstance(t, Stack))
    return made


def test_trials_of_equal_shapes_are_not_padded() -> None:
    """Four of one width stay a stack of their own beside others that are padded."""
    jobs = jobs_of(mlp, (16, 16, 16, 16, 5, 7, 9))
    made = Assembler(task_of()).assemble(jobs, 64)
    assert {tuple(sorted(t.numbers)): t._masks is not None for t in made.trainers if isinstance(t, Stack)} == {
        (0, 1, 2, 3): False,
        (4, 5, 6): True,
    }


def test_a_diverged_padded_lane_changes_no_other_by_a_bit() -> None:
    """With a learning rate of 1e38 in one lane, wide or narrow, the others' losses are bit-equal."""
    calm = jobs_of(mlp)
    for wild in (0, 3):
        jobs = [job(n, one.model, lr=1e38) if n == wild else one for n, one in enumerate(calm)]
        first, second = (train(Assembler(task_of()).assemble(some, 64).trainers, EPOCHS) for some in (calm, jobs))
        assert not math.isfinite(second[wild][-1].train_loss)
        for number in {0, 1, 2, 3} - {wild}:
            ours, theirs = ([(r.train_loss, r.validation) for r in found[number]] for found in (first, second))
            assert ours == theirs


@pytest.mark.parametrize("batch_sizes", [(8,), (8, 16)])
def test_padded_lanes_that_leave_change_no_other(batch_sizes: tuple[int, ...]) -> None:
    """The wide ones leave; the narrow ones go on as if alone, and their weights load into their own networks."""
    task = task_of()
    jobs = [job(n, lambda w=w: mlp(w), batch_size=batch_sizes[n % len(batch_sizes)]) for n, w in enumerate(WIDTHS)]
    (stack,) = Assembler(task).assemble(jobs, 64).trainers
    assert isinstance(stack, Stack)
    found = train([stack], 2)
    stack.leave([0, 3])
    assert sorted(stack.numbers) == [1, 2]
    later = train([stack], 2)
    assert_zero_where_padded(stack)
    for number in (1, 2):
        lone = Lone(jobs[number], task)
        alone = [r.train_loss for r in train([lone], EPOCHS)[number]]
        assert [r.train_loss for r in found[number] + later[number]] == pytest.approx(alone, rel=1e-4)
        jobs[number].model().load_state_dict(stack.weights(number), strict=True)
        for name, tensor in lone.weights(number).items():
            torch.testing.assert_close(stack.weights(number)[name], tensor, rtol=1e-3, atol=1e-5)


class Repeating(nn.Module):
    """A whole number that is no size: how often a layer is applied."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.first, self.again, self.last = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = torch.tanh(self.again(x))
        return self.last(x)


def test_a_number_that_is_no_size_keeps_trials_apart() -> None:
    """Networks that apply a layer once or thrice are padded with their like, also in a second cohort."""
    jobs = [job(n, lambda n=n: Repeating(4 + n, 1 + 2 * (n % 2))) for n in range(6)]
    made = assert_like_alone(jobs, 6)
    assert {tuple(sorted(t.numbers)) for t in made.trainers} == {(0, 2, 4), (1, 3, 5)}
    task = task_of()
    assembler = Assembler(task)
    assembler.assemble([one for one in jobs if one.number % 2], 64)
    others = assembler.assemble([one for one in jobs if not one.number % 2], 64)
    assert (stacked(others), others.notices) == (3, [])


def test_programs_serve_later_cohorts() -> None:
    """Trials that fit into a network that was recorded before are padded to it, and nothing is recorded anew."""
    assembler = Assembler(task_of())
    assert stacked(assembler.assemble(jobs_of(mlp, (30, 6, 17)), 64)) == 3
    ((recorded, program),) = [entry for kind in assembler._padded.values() for entry in kind.items()]
    made = assembler.assemble(jobs_of(mlp, (32, 5, 29, 18)), 64)
    assert stacked(made) == 4
    assert [entry for kind in assembler._padded.values() for entry in kind.items()] == [(recorded, program)]


def members(widths: Sequence[int], **sgd: Any) -> list[Member]:
    found = []
    for one in jobs_of(mlp, widths, **sgd):
        module = one.model()
        found.append(Member(one, module, one.number, form(module, None)))
    return found


def test_few_epochs_are_not_worth_a_record() -> None:
    """Two trials of three epochs are trained alone, two of a thousand together."""
    for epochs, count in ((3, 0), (1000, 1)):
        assert len(Choice(members((8, 9)), [], task_of(epochs), 64).clusters()) == count


def test_narrow_trials_are_not_padded_to_very_wide_ones() -> None:
    """Widths around 10 and around 1000 are two clusters: padding to 1000 would cost more than another stack."""
    found = Choice(members((9, 1000, 12, 1001, 10, 1002)), [], task_of(), 64).clusters()
    assert [[m.job.number for m in cluster] for cluster, _ in found] == [[0, 4, 2], [1, 3, 5]]


def test_no_stack_has_more_lanes_than_allowed() -> None:
    """Eight trials for three lanes are at least three stacks."""
    made = Assembler(task_of()).assemble(jobs_of(mlp, range(4, 12)), 3)
    assert stacked(made) > 5
    assert all(len(trainer.numbers) <= 3 for trainer in made.trainers)


def test_sizes_that_are_multiples_stay_multiples() -> None:
    """A layer behind a flattened convolution has 9 inputs for each channel, also when both are padded."""
    forms = [Form(None, (w, 9 * w, 10), (w, 9 * w, 3)) for w in (5, 17)]
    sizes = wide_sizes(forms)
    assert sizes == (32, 288, 10)
    assert wide_numbers(forms, sizes) == [{32}, {288}, {3}]


def test_a_number_follows_the_size_that_it_is_equal_to() -> None:
    """Any whole number of times it; one that follows none has no value in a wider network."""
    forms = [Form(None, (5, 3), (5, 10, 1)), Form(None, (7, 4), (7, 14, 2))]
    assert wide_numbers(forms, (16, 8)) == [{16}, {32}, set()]


def test_a_padded_epoch_waits_for_nothing_and_laps_both_parts() -> None:
    """A padded stack keeps the trainer's contract: training and validation are timed."""
    (stack,) = Assembler(task_of()).assemble(jobs_of(mlp), 64).trainers
    watch = Stopwatch()
    stack.epoch(watch)
    assert set(watch.totals) == {"train", "validate"}


class Choosy(nn.Module):
    """It refuses weights that training from its start never gives it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, 3)
        nn.init.zeros_(self.first.bias)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        try:
            changed = bool(self.first.bias.any())
        except RuntimeError:
            changed = False  # In a stack nobody can look.
        if changed:
            raise ValueError("a bias")
        return self.last(self.first(x))


def test_a_network_that_raises_with_other_weights_is_not_padded() -> None:
    """The comparison with changed weights may be refused by the network: then its trials are trained alone."""
    made = assert_like_alone(jobs_of(Choosy), 0)
    assert "ValueError in a wider network: a bias" in made.notices[0]


class Raising(nn.Module):
    """Its forward pass raises."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


def test_networks_that_raise_do_not_end_the_assembling() -> None:
    """Trials whose networks cannot run at all become lone trainers, which raise when they train."""
    made = Assembler(task_of()).assemble(jobs_of(Raising), 64)
    assert [len(trainer.numbers) for trainer in made.trainers] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="never"):
        made.trainers[0].epoch(Stopwatch())
