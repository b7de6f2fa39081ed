"""Samplers and pruners by name, as Optuna has them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tuner.errors import UsageError
from tuner.halving import Halving
from tuner.tpe import RoundTPESampler, tpe_sampler

SAMPLERS = ("tpe", "gp", "cmaes", "random", "qmc", "grid", "nsgaii")
LEARNING = ("tpe", "gp", "cmaes", "nsgaii")
"""Those whose samples depend on trials that have ended."""

PRUNERS = ("none", "median", "halving", "hyperband", "patient", "threshold")

GRID_LIMIT = 100_000
"""More cells than this are a mistake, not a grid."""


def sampler(name: str, seed: int | None) -> optuna.samplers.BaseSampler:
    """A sampler from `SAMPLERS`; ``grid`` has its cells in the queue (`grid_cells`), and draws nothing itself."""
    if name == "tpe":
        return tpe_sampler(seed)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if name == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name == "qmc":
        with warnings.catch_warnings():
            # "Experimental" in Optuna since 3.0; who asks for it by name need not be told.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False)
    if name == "nsgaii":
        return optuna.samplers.NSGAIISampler(seed=seed)
    if name in ("random", "grid"):
        return optuna.samplers.RandomSampler(seed=seed)
    raise UsageError(f"--sampler {name}: wanted one of {', '.join(SAMPLERS)}")


def asked_together(sampler: optuna.samplers.BaseSampler, trials: int) -> AbstractContextManager[None]:
    """Inside, up to `trials` trials are asked for, and none ends: a sampler that can learns once for all of them."""
    return sampler.round(trials) if isinstance(sampler, RoundTPESampler) else nullcontext()


def pruner(name: str, epochs: int, threshold: float | None, maximize: bool) -> optuna.pruners.BasePruner:
    """A pruner from `PRUNERS`, with its usual settings for trials of `epochs` epochs.

    `threshold` is the value that ``threshold`` does not let a trial be worse than, from a tenth of its epochs on.
    """
    if name == "none":
        return optuna.pruners.NopPruner()
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=epochs // 10)
    if name == "halving":
        return Halving(epochs)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=max(1, epochs // 9), max_resource=epochs, reduction_factor=3)
    if name == "patient":
        inner = optuna.pruners.MedianPruner(n_startup_trials=5)
        with warnings.catch_warnings():
            # "Experimental" in Optuna since 2.8.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.pruners.PatientPruner(inner, patience=max(1, epochs // 10))
    if name == "threshold":
        if threshold is None:
            raise UsageError("--pruner threshold: also say --threshold VALUE, which no trial may be worse than")
        lower, upper = (threshold, None) if maximize else (None, threshold)
        return optuna.pruners.ThresholdPruner(lower=lower, upper=upper, n_warmup_steps=epochs // 10)
    raise UsageError(f"--pruner {name}: wanted one of {', '.join(PRUNERS)}")


def grid_cells(distributions: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Every combination of the values of a search space of choices and steps. Raises `UsageError` where it has none."""
    axes = {name: _grid_values(name, distribution) for name, distribution in sorted(distributions.items())}
    size = 1
    for values in axes.values():
        size *= len(values)
    if size > GRID_LIMIT:
        raise UsageError(f"--sampler grid: {size:,} cells, at most {GRID_LIMIT:,}; use larger steps or --sampler qmc")
    return [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]


def _grid_values(name: str, distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution) and not distribution.log:
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    if isinstance(distribution, FloatDistribution) and distribution.step is not None:
        steps = round((distribution.high - distribution.low) / distribution.step)
        # Rounding may carry the last one above the end: 3 * 0.1 > 0.3.
        return [min(distribution.low + i * distribution.step, distribution.high) for i in range(steps + 1)]
    raise UsageError(f"--sampler grid: {name} has no steps; give it choices or step=, or use --sampler qmc")
