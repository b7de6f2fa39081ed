"""Lone training against PyTorch's own optimizer, schedules and arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tuner.clock import Stopwatch
from tuner.data import Resident, Splits, epoch_order, epoch_seed, prepare
from tuner.dropout import with_tensor_rates
from tuner.spec import LoadedSpec, explore
from tuner.study_file import load_spec
from tuner.train import SGD, EpochResult, Job, Lone, Task, evaluate

CPU = torch.device("cpu")
EPOCHS = 3


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return x, torch.randint(0, 3, (count,), generator=generator)


def make_task(train: Any = None, validation: Any = None, **metrics: Any) -> Task:
    splits = Splits(train or examples(23), validation or examples(11, seed=1))
    data = prepare(splits, CPU, "here")
    return Task(data.train, data.validation, metrics, EPOCHS, CPU)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def job(sgd: SGD, model: Any = network, loss: Any = nn.functional.cross_entropy) -> Job:
    return Job(0, model, loss, sgd, seed=4)


def train(lone: Lone, epochs: int = EPOCHS) -> list[EpochResult]:
    watch = Stopwatch()
    return [result for _ in range(epochs) for result in lone.epoch(watch)]


def by_hand(sgd: SGD, model: Any = network, loss: Any = nn.functional.cross_entropy) -> nn.Module:
    """The loop that a user of PyTorch writes, with ``torch.optim.SGD``."""
    x, y = examples(23)
    torch.manual_seed(4)
    module = with_tensor_rates(model())
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        parameters,
        lr=sgd.lr,
        momentum=sgd.momentum,
        dampening=sgd.dampening,
        weight_decay=sgd.weight_decay,
        nesterov=sgd.nesterov,
    )
    for epoch in range(EPOCHS):
        torch.manual_seed(epoch_seed(4, epoch))
        module.train()
        for indices in epoch_order(len(x), 4, epoch).split(sgd.batch_size):
            optimizer.zero_grad()
            loss(module(x[indices]), y[indices]).backward()
            optimizer.step()
    return module


def assert_same_weights(lone: Lone, module: nn.Module) -> None:
    ours, theirs = lone.weights(0), module.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class HalfFrozen(nn.Module):
    """Its first layer is not trained, and `extra` is used in every fifth step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)
        self.extra = nn.Parameter(torch.ones(3))
        self.first.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out + self.extra if self.calls % 5 == 1 else out


@pytest.mark.parametrize(
    "sgd",
    [
        SGD(0.1, 4),
        SGD(0.1, 4, momentum=0.9),
        SGD(0.1, 4, momentum=0.9, dampening=0.3),
        SGD(0.1, 4, momentum=0.9, nesterov=True),
        SGD(0.1, 4, weight_decay=0.01),
        SGD(0.1, 4, momentum=0.7, weight_decay=0.01, nesterov=True),
        SGD(0.1, 4, momentum=0.7, dampening=0.1, weight_decay=0.01),
        SGD(0.1, 64, momentum=0.7),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [network, HalfFrozen])
def test_lone_is_the_plain_loop_with_sgd_bit_for_bit(sgd: SGD, model: Any) -> None:
    """Momentum, dampening, Nesterov, weight decay, dropout, frozen and now and then unused parameters: equal bits."""
    lone = Lone(job(sgd, model), make_task())
    before = lone.weights(0)
    train(lone)
    assert any(not torch.equal(before[name], value) for name, value in lone.weights(0).items())
    assert_same_weights(lone, by_hand(sgd, model))


def test_a_parameter_that_a_step_does_not_use_is_left_alone_by_it() -> None:
    """No gradient is not a zero gradient: neither weight decay nor momentum moves an unused parameter."""
    lone = Lone(job(SGD(0.1, 64, momentum=0.9, weight_decay=0.5), HalfFrozen), make_task())
    watch = Stopwatch()
    lone.epoch(watch)
    after_first = lone.weights(0)["extra"]
    lone.epoch(watch)
    assert not torch.equal(after_first, torch.ones(3))
    assert torch.equal(lone.weights(0)["extra"], after_first)


def rates(sgd: SGD, epochs: int, steps: int) -> list[float]:
    return [sgd.rate(epoch + step / steps, epochs) for epoch in range(epochs) for step in range(steps)]


def scheduled(make: Any, steps: int, lr: float = 0.5) -> list[float]:
    """The rates that a scheduler of PyTorch's gives, one for each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_schedule_by_name_is_pytorchs_own() -> None:
    """Cosine, step and constant give the rates of ``torch.optim.lr_scheduler`` at every step."""
    from torch.optim import lr_scheduler as schedulers

    steps, epochs = 4, 6
    cosine = scheduled(lambda o: schedulers.CosineAnnealingLR(o, T_max=steps * epochs), steps * epochs)
    assert rates(SGD(0.5, 1, schedule="cosine"), epochs, steps) == pytest.approx(cosine, abs=1e-6)
    step = scheduled(lambda o: schedulers.StepLR(o, step_size=2 * steps, gamma=0.3), steps * epochs)
    found = rates(SGD(0.5, 1, schedule="step", step_epochs=2, step_gamma=0.3), epochs, steps)
    assert found == pytest.approx(step, abs=1e-6)
    assert rates(SGD(0.5, 1), epochs, steps) == [0.5] * (steps * epochs)


def test_one_cycle_is_pytorchs_own() -> None:
    """The one-cycle rates are those of OneCycleLR, from its start over its peak to its end."""
    from torch.optim.lr_scheduler import OneCycleLR

    steps, epochs = 5, 4
    # OneCycleLR is at its end in its last step, here the schedule is at the end of the last epoch: one step later. Its
    # peak is at 0.3 * total_steps - 1, here at 0.3 of the way. So each step is compared at the same share of its phase.
    sgd = SGD(0.5, 1, schedule="one-cycle")
    theirs = scheduled(lambda o: OneCycleLR(o, max_lr=0.5, total_steps=steps * epochs + 1), steps * epochs + 1)
    ours = [*rates(sgd, epochs, steps), sgd.rate(epochs, epochs)]
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert ours[-1] == pytest.approx(theirs[-1], abs=1e-6)
    assert max(ours) == pytest.approx(0.5)
    rise = 0.3 * (steps * epochs + 1) - 1
    for step, theirs_at in enumerate(theirs):
        share = step / rise * 0.3 if step <= rise else 0.3 + (step - rise) / (steps * epochs - rise) * 0.7
        assert sgd.rate(share * epochs, epochs) == pytest.approx(theirs_at, abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "one-cycle"])
def test_warm_up_rises_from_zero_and_then_the_schedule_begins(schedule: str) -> None:
    """The rate is linear from 0 to where the schedule starts, which then has the epochs that are left."""
    sgd = SGD(0.5, 1, schedule=schedule, warmup_epochs=2, step_epochs=3)
    rest = SGD(0.5, 1, schedule=schedule, step_epochs=3)
    rise = [sgd.rate(epoch, 8) for epoch in (0, 0.5, 1, 1.5)]
    assert rise == pytest.approx([rise[2] * share for share in (0, 0.5, 1, 1.5)])
    assert 2 * rise[2] == pytest.approx(0.5)
    for epoch in (2, 2.5, 4, 5.5, 7.9):
        assert sgd.rate(epoch, 8) == pytest.approx(rest.rate(epoch - 2, 6), abs=1e-12)


def test_the_rate_is_asked_at_every_step() -> None:
    """A cosine schedule changes the weights as PyTorch's does, stepped once a batch."""
    sgd = SGD(0.3, 6, schedule="cosine")
    lone = Lone(job(sgd, lambda: nn.Linear(5, 3)), make_task())
    train(lone)
    x, y = examples(23)
    torch.manual_seed(4)
    module = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 4)
    for epoch in range(EPOCHS):
        for indices in epoch_order(23, 4, epoch).split(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[indices]), y[indices]).backward()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(lone.weights(0), dict(module.state_dict()), rtol=1e-5, atol=1e-6)


def test_losses_and_metrics_are_means_over_examples_and_not_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small last batch counts by its examples, in the training loss and in what is measured on a split."""
    monkeypatch.setattr("tuner.train.EVALUATION_BATCH", 4)

    def hits(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(dim=1) == target).float().mean()

    lone = Lone(job(SGD(0.0, 10), lambda: nn.Linear(5, 3)), make_task(hits=hits))
    (result,) = train(lone, 1)
    module = nn.Linear(5, 3)
    module.load_state_dict(lone.weights(0))
    with torch.no_grad():
        (x, y), (v, w) = examples(23), examples(11, seed=1)
        assert result.train_loss == pytest.approx(nn.functional.cross_entropy(module(x), y).item(), rel=1e-6)
        assert result.validation["loss"] == pytest.approx(nn.functional.cross_entropy(module(v), w).item(), rel=1e-6)
        assert result.validation["hits"] == pytest.approx(hits(module(v), w).item(), rel=1e-6)
    assert result.samples == 23


class Named(nn.Module):
    """Takes two inputs, `a` and `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.layer(a - 2 * b)
        return out


@pytest.mark.parametrize("kind", ["dictionary", "tuple", "list"])
def test_several_inputs_come_by_name_or_by_place(kind: str) -> None:
    """A dictionary of inputs is given by keyword, a tuple or list by position; the same numbers come out."""
    x, y = examples(23)
    half = x / 4

    def packed(a: Tensor, b: Tensor) -> Any:
        return {"dictionary": {"b": b, "a": a}, "tuple": (a, b), "list": [a, b]}[kind]

    lone = Lone(job(SGD(0.1, 4), Named), make_task((packed(x, half), y), (packed(x, half), y)))
    results = train(lone)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x - 2 * (x / 4))
            return out

    expected = train(Lone(job(SGD(0.1, 4), Plain), make_task((x, y), (x, y))))
    assert [r.validation for r in results] == [r.validation for r in expected]


def test_targets_may_be_a_dictionary() -> None:
    """The loss is given targets as they were stored, cut to the batch."""
    x, y = examples(23)
    seen = set()

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        seen.add((tuple(target), len(target["class"])))
        return nn.functional.cross_entropy(output, target["class"])

    split = (x, {"class": y, "weight": torch.ones(23)})
    train(Lone(job(SGD(0.1, 10), lambda: nn.Linear(5, 3), loss), make_task(split, split)), 1)
    assert seen == {(("class", "weight"), count) for count in (10, 3, 23)}


def test_a_model_that_changes_its_input_does_not_change_the_data() -> None:
    """A first layer that works in place sees the same validation examples every epoch."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.mul_(0.5).add_(1))
            return out

    x, y = examples(23)
    kept = x.clone()
    results = train(Lone(job(SGD(0.0, 4), InPlace), make_task((x, y), (x, y))))
    assert torch.equal(x, kept)
    assert len({r.validation["loss"] for r in results}) == 1


def test_a_metric_may_return_one_number_of_any_kind() -> None:
    """A Python number, a tensor with or without a dimension, an integer: one number each."""
    metrics = {
        "python": lambda output, target: 0.25,
        "whole": lambda output, target: torch.tensor(3),
        "row": lambda output, target: torch.tensor([0.5]),
    }
    (result,) = train(Lone(job(SGD(0.1, 4)), make_task(**metrics)), 1)
    assert {name: result.validation[name] for name in metrics} == {"python": 0.25, "whole": 3.0, "row": 0.5}


def test_evaluation_neither_trains_nor_drops_out() -> None:
    """Evaluating twice gives the same, in evaluation mode, and leaves no gradient and no random number behind."""
    task = make_task()
    module = network()
    state = torch.get_rng_state()
    first = evaluate(module, nn.functional.cross_entropy, task, task.validation)
    assert evaluate(module, nn.functional.cross_entropy, task, task.validation) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())


def test_dropout_is_the_trials_own_and_not_that_of_what_ran_before() -> None:
    """An epoch's randomness comes from the trial's seed and the epoch alone."""
    first = train(Lone(job(SGD(0.1, 4)), make_task()))
    torch.manual_seed(99)
    lone = Lone(job(SGD(0.1, 4)), make_task())
    watch, second = Stopwatch(), []
    for _ in range(EPOCHS):
        torch.rand(17)
        second += lone.epoch(watch)
    assert [(r.train_loss, r.validation) for r in first] == [(r.train_loss, r.validation) for r in second]


def test_parts_of_an_epoch_are_timed_and_add_up() -> None:
    """Seconds of training and of validation are those that the stopwatch saw, and none is lost."""
    ticks = iter(range(1000))
    watch = Stopwatch(now=lambda: float(next(ticks)))
    lone = Lone(job(SGD(0.1, 4)), make_task())
    (result,) = lone.epoch(watch)
    assert (result.train_seconds, result.validate_seconds) == (1.0, 1.0)
    assert watch.totals == {"train": 1.0, "validate": 1.0}


def test_a_lane_that_left_is_gone() -> None:
    """A trainer names the trials that it still trains."""
    lone = Lone(job(SGD(0.1, 4)), make_task())
    lone.leave([7])
    assert lone.numbers == (0,)
    lone.leave([0])
    assert lone.numbers == ()


def test_weights_are_a_copy() -> None:
    """What was kept of the best epoch does not change with later ones."""
    lone = Lone(job(SGD(0.5, 4), lambda: nn.Linear(5, 3)), make_task())
    kept = lone.weights(0)
    before = {name: value.clone() for name, value in kept.items()}
    train(lone, 1)
    for name, value in before.items():
        assert torch.equal(kept[name], value)
        assert not torch.equal(lone.weights(0)[name], value)


@pytest.fixture(scope="module", params=["digits_mlp", "digits_cnn", "diabetes_mlp"])
def loaded(request: pytest.FixtureRequest) -> LoadedSpec:
    return load_spec(request.param)


def test_the_same_trial_twice_gives_the_same_bits(loaded: LoadedSpec) -> None:
    """For each study file on one CPU thread: equal losses, metrics and weights, whatever was drawn in between."""
    torch.set_num_threads(1)
    data = prepare(loaded.spec.data(), CPU, loaded.origin)
    task = loaded.spec.task(data, CPU)
    hyperparameters = explore(loaded).samples[1]

    def once(number: int) -> tuple[list[Any], dict[str, Tensor]]:
        lone = Lone(loaded.spec.job(number, hyperparameters), task)
        results = train(lone, 2)
        return [(r.train_loss, dict(r.validation)) for r in results], lone.weights(number)

    first, first_weights = once(3)
    torch.rand(5)
    second, second_weights = once(3)
    third, _ = once(8)
    assert first == second
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    assert first[0] != first[1]
    assert third != first  # Other initial weights.


def test_training_does_not_load_the_compiler() -> None:
    """``torch._dynamo`` costs more than a second at every start: neither importing nor training brings it in."""
    code = """
import sys
import tuner.train, tuner.spec, tuner.data, tuner.search, torch
from torch import nn
from tuner.clock import Stopwatch
x, y = torch.randn(8, 3), torch.randn(8, 1)
cpu = torch.device("cpu")
data = tuner.data.prepare(tuner.data.Splits((x, y), (x, y)), cpu, "here")
task = tuner.train.Task(data.train, data.validation, {}, 2, cpu)
job = tuner.train.Job(0, lambda: nn.Linear(3, 1), nn.functional.mse_loss, tuner.train.SGD(0.1, 4, momentum=0.9), 0)
lone = tuner.train.Lone(job, task)
for _ in range(2):
    lone.epoch(Stopwatch())
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_resident_examples_can_be_read_as_a_whole() -> None:
    """A stack reads the examples where they lie."""
    x, y = examples(7)
    inputs, target = Resident((x, y), CPU).examples
    assert torch.equal(inputs, x)
    assert torch.equal(target, y)
