"""A spec says what is tuned: data, search space, model, loss, metrics, epochs. One per study file.

How it is run (device, workers, lanes) is not its business, and never changes what is learned.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from torch import nn

from tuner.data import Data, Splits
from tuner.errors import SpecError
from tuner.train import SCHEDULES, SGD, Job, Loss, Metric, Task

Hyperparameters = dict[str, Any]

PROBES = 64
"""How many samples explore a define-by-run search space: a branch taken once in ten is missed once in 850 studies."""

_HERE = Path(__file__).parent
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Folders of code that is not the user's."""

SGD_NAMES = frozenset(f.name for f in dataclasses.fields(SGD))


@dataclass(frozen=True)
class StudySpec:
    """What is tuned.

    Args:
        name: The study's name in the storage.
        data: Called once per process; returns `Splits`.
        space: Called with an ``optuna.Trial``; returns the hyperparameters. `lr` and `batch_size` must be among them;
            `momentum`, `dampening`, `weight_decay`, `nesterov`, `schedule` (``constant``, ``cosine``, ``step``,
            ``one-cycle``), `warmup_epochs`, `step_epochs` and `step_gamma` are the optimizer's if they are there;
            all others are the model's or the loss's.
        model: Called with the hyperparameters; returns a new module on the CPU. The random seed has been set.
        loss: ``loss(output, target)``, or ``loss(output, target, hyperparameters)``: the mean over a batch.
        metrics: By name, functions ``(output, target)`` that return the mean over a batch.
        epochs: Passes over the training split.
        objective: ``loss`` or the name of a metric: its best value over the epochs, on the validation split, is a
            trial's value.
        direction: ``minimize`` or ``maximize`` the objective.
        seed: Seeds the order of examples and dropout, the same for all trials, and with a trial's number added the
            initial weights of that trial: a study of lucky weights would not know what its hyperparameters are worth.
        description: For the dashboard; the study file's docstring if empty.
    """

    name: str
    data: Callable[[], Splits]
    space: Callable[[optuna.Trial], dict[str, Any]]
    model: Callable[[Hyperparameters], nn.Module]
    loss: Callable[..., Any]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    epochs: int = 20
    objective: str = "loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    seed: int = 0
    description: str = ""

    def __post_init__(self) -> None:
        for name in ("data", "space", "model", "loss"):
            _require(callable(getattr(self, name)), f"{name} must be a function", getattr(self, name))
        _require(isinstance(self.name, str) and 0 < len(self.name) <= 500, "name must be a short text", self.name)
        _require("\0" not in self.name, "name must not hold a NUL", self.name)
        _require(isinstance(self.metrics, Mapping), "metrics must be a dictionary of functions", self.metrics)
        for name, metric in self.metrics.items():
            _require(callable(metric), f"the metric {name!r} must be a function", metric)
            _require(name != "loss", "a metric must not be called", name)
        _require(type(self.epochs) is int and self.epochs > 0, "epochs must be a positive integer", self.epochs)
        _require(type(self.seed) is int and self.seed >= 0, "seed must be an integer from 0", self.seed)
        measures = ", ".join(["loss", *self.metrics])
        _require(self.objective in ("loss", *self.metrics), f"objective must be one of {measures}", self.objective)
        directions = ("minimize", "maximize")
        _require(self.direction in directions, "direction must be minimize or maximize", self.direction)

    def job(self, number: int, hyperparameters: Hyperparameters) -> Job:
        """What trial `number` trains; raises `SpecError` where a hyperparameter is missing or makes no sense."""
        return Job(
            number=number,
            model=partial(self._build, hyperparameters),
            loss=self._loss(hyperparameters),
            sgd=sgd(hyperparameters),
            seed=self.seed,
            weights_seed=self.seed + number,
            loss_key=None if required_arguments(self.loss) < 3 else _values(hyperparameters),
        )

    def task(self, data: Data, device: Any, precision: str = "float32") -> Task:
        """What all trials share."""
        return Task(data.train, data.validation, self.metrics, self.epochs, device, precision)

    def _build(self, hyperparameters: Hyperparameters) -> nn.Module:
        module = self.model(hyperparameters)
        if not isinstance(module, nn.Module):
            raise SpecError(f"model() must return a torch.nn.Module; found {type(module).__name__}")
        return module

    def _loss(self, hyperparameters: Hyperparameters) -> Loss:
        # A loss that is an object may remember something: each trial gets its own.
        loss = self.loss if inspect.isroutine(self.loss) else copy.deepcopy(self.loss)
        if required_arguments(loss) < 3:
            return loss
        return lambda output, target: loss(output, target, hyperparameters)


@dataclass(frozen=True)
class LoadedSpec:
    """A spec and where it came from; `source` loads it again in another process."""

    spec: StudySpec
    source: str
    origin: str
    description: str


@dataclass(frozen=True)
class Space:
    """A define-by-run search space, explored: the parameters that were met, and some samples of hyperparameters."""

    distributions: Mapping[str, BaseDistribution]
    samples: Sequence[Hyperparameters]


def sgd(hyperparameters: Hyperparameters) -> SGD:
    """The optimizer's part of the hyperparameters, checked; raises `SpecError`."""
    found = {name: hyperparameters[name] for name in SGD_NAMES if name in hyperparameters}
    for name in ("lr", "batch_size"):
        if name not in found:
            raise SpecError(f"space() must return {name!r}; found {', '.join(map(repr, hyperparameters)) or 'nothing'}")
    for name, value in found.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name == "schedule" and value not in SCHEDULES:
            raise SpecError(f"schedule must be one of {', '.join(SCHEDULES)}; found {value!r}")
        if name == "batch_size" and not (type(value) is int and value > 0):
            raise SpecError(f"batch_size must be a positive integer; found {value!r}")
        if name not in ("schedule", "nesterov", "batch_size") and not (number and value >= 0):
            raise SpecError(f"{name} must be a number from 0; found {value!r}")
    if found.get("nesterov") and not found.get("momentum"):
        # Without momentum Nesterov's step is the plain one; torch.optim.SGD refuses the pair, a space may sample it.
        found["nesterov"] = False
    if found.get("nesterov") and found.get("dampening"):
        raise SpecError(f"nesterov needs a dampening of 0, as in torch.optim.SGD; found {found['dampening']!r}")
    return SGD(**found)


def explore(loaded: LoadedSpec) -> Space:
    """Sample the search space a number of times, with a fixed seed, in memory. Raises `SpecError`."""
    sampler = optuna.samplers.RandomSampler(seed=0)
    with quiet_optuna():
        study = optuna.create_study(sampler=sampler)
    distributions: dict[str, BaseDistribution] = {}
    samples = []
    failure: Exception | None = None
    for _ in range(PROBES):
        trial = study.ask()
        try:
            hyperparameters: Any = loaded.spec.space(trial)
        except Exception as error:
            # Some samples may be ruled out so: their trials fail, or are pruned, in their turn.
            failure = error
            continue
        if not isinstance(hyperparameters, dict):
            found = type(hyperparameters).__name__
            raise SpecError(f"{loaded.origin}: space() must return a dictionary; found {found}")
        try:
            sgd(hyperparameters)
        except SpecError as error:
            raise SpecError(f"{loaded.origin}: {error}") from error
        samples.append(hyperparameters)
        distributions.update(trial.distributions)
    if not samples:
        assert failure is not None
        raise SpecError(f"{loaded.origin}: space() raised {one_line(failure)}") from failure
    return Space(distributions, samples)


def required_arguments(function: Callable[..., Any]) -> int:
    """How many positional arguments a function demands; 2 where nobody can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def one_line(error: BaseException) -> str:
    """An error in one line: its type, its message's first line, and the last line of the user's code that led to it."""
    text = " ".join(str(error).strip().partition("\n")[0].split())[:300]
    paths = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(path, line) for path, line in paths if path.parent != _HERE and not _LIBRARIES.intersection(path.parts)]
    places = own or paths
    where = f" ({places[-1][0].name}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}{': ' + text if text else ''}{where}"


class quiet_optuna:  # noqa: N801 - used as a function in a with statement
    """A block in which Optuna prints no information lines; its warnings stay."""

    def __enter__(self) -> None:
        self._verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def __exit__(self, *_: object) -> None:
        optuna.logging.set_verbosity(self._verbosity)


def _values(hyperparameters: Hyperparameters) -> str:
    """All that a loss may depend on, but what the optimizer takes, as text."""
    return repr({name: value for name, value in hyperparameters.items() if name not in SGD_NAMES})


def _require(condition: bool, wanted: str, found: object) -> None:
    if not condition:
        raise SpecError(f"StudySpec: {wanted}; found {found!r}")
