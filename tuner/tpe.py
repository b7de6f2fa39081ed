"""TPE for trials that are asked for together: one fit for a round, however many trials it starts.

Optuna's TPESampler fits its two densities anew for each trial: l(x) to the best trials, g(x) to all others, and chooses
the best of some candidates from l by l(x)/g(x) (Bergstra et al. 2011, "Algorithms for hyper-parameter optimization").
Between the trials of a round nothing new is observed, so here the fit is kept. A sibling draws candidates of its own,
and g gets one more kernel for each sibling before it, as from a bad trial: that keeps them apart (the constant liar of
Ginsbourger et al. 2010, as Optuna has it).

What a fit costs stops to grow: l is made of at most the `KERNELS` best trials, g of as many others, half of them the
latest, half chosen evenly from those before, with the weight of all of them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

try:
    from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator, _ParzenEstimatorParameters
    from optuna.samplers._tpe.probability_distributions import _MixtureOfProductDistribution
    from optuna.samplers._tpe.sampler import _split_trials, default_gamma, default_gamma_multiobjective
except ImportError:  # an Optuna that we do not know: `tpe_sampler` sees it
    _IMPORTED = False
else:
    _IMPORTED = True

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

KERNELS = 500
"""Of so many trials at most each of the two densities is made: 250 found worse values on a function of many optima."""

BLOCK = 8
"""Candidates for so many siblings are drawn at once: most of the time goes into calls of small arrays."""

Space = dict[str, "BaseDistribution"]
Candidates = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]

_METHODS = {
    "before_trial": "study trial",
    "infer_relative_search_space": "study trial",
    "sample_relative": "study trial search_space",
    "sample_independent": "study trial param_name param_distribution",
    "_sample_relative": "study trial search_space",
    "_sample": "study trial search_space",
    "_get_internal_repr": "trials search_space study",
    "_get_params": "trial study",
    "_build_parzen_estimator": "study search_space trials handle_below",
    "_compare": "samples acquisition_func_vals",
}
_ATTRIBUTES = {
    *("_rng", "_random_sampler", "_n_startup_trials", "_n_ei_candidates", "_constant_liar", "_gamma", "_group"),
    "_parzen_estimator_parameters",
}


def tpe_sampler(seed: int | None) -> TPESampler:
    """A `RoundTPESampler`; Optuna's own where this Optuna's inside is not the one that is known here."""
    return RoundTPESampler(seed=seed) if _is_known(TPESampler(seed=seed)) else TPESampler(seed=seed)


def _is_known(sampler: TPESampler) -> bool:
    if not (_IMPORTED and vars(sampler).keys() >= _ATTRIBUTES):
        return False
    rest = "search_space parameters"
    used: list[tuple[Any, str]] = [(getattr(sampler, name, None), names) for name, names in _METHODS.items()]
    used += [
        (_split_trials, "study trials n_below"),
        (_ParzenEstimator, f"observations {rest} predetermined_weights"),
        (getattr(_ParzenEstimator, "sample", None), "self rng size"),
        (getattr(_ParzenEstimator, "log_pdf", None), "self samples_dict"),
        (getattr(_ParzenEstimator, "_calculate_distributions", None), f"self observations param_name {rest}"),
        (_MixtureOfProductDistribution, "weights distributions"),
        (getattr(Study, "_get_trials", None), "self deepcopy states use_cache"),
    ]
    return all(callable(f) and list(inspect.signature(f).parameters) == names.split() for f, names in used)


class RoundTPESampler(TPESampler):
    """Optuna's TPESampler, which inside of `round` fits once for each set of parameters that is sampled together.

    Outside of `round` it is Optuna's. It takes the same arguments.

    It relies on what Optuna 5.0 does not promise, and `tpe_sampler` looks whether it is there: TPESampler's methods and
    attributes in `_METHODS` and `_ATTRIBUTES`, ``_split_trials``, ``_ParzenEstimator`` with its method
    ``_calculate_distributions``, ``_MixtureOfProductDistribution``, and ``Study._get_trials``.
    """

    _round: _Round | None = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._best: dict[str, _Best] = {}

    @contextmanager
    def round(self, trials: int) -> Iterator[None]:
        """The trials that are asked for and sampled inside, at most `trials` of them, share their fits."""
        self._round = _Round(trials)
        try:
            yield
        finally:
            self._round = None

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        super().before_trial(study, trial)
        if self._round is not None:
            self._round.siblings[trial.number] = _Sibling(trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        if self._round is None:
            return super().infer_relative_search_space(study, trial)
        seen = self._seen(study, self._round)
        if seen.space is None:
            seen.space = super().infer_relative_search_space(study, trial)
        return dict(seen.space)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        if self._round is None or self._group:
            return super().sample_relative(study, trial, search_space)
        # Without Optuna's attribute for other workers, a transaction for each trial: they read the parameters soon.
        return self._sample_relative(study, trial, search_space)

    def _sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        if self._round is None:
            return super()._sample_relative(study, trial, search_space)
        known = len(self._seen(study, self._round).finished)
        return self._sample(study, trial, search_space) if search_space and known >= self._n_startup_trials else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if self._round is None:
            return super().sample_independent(study, trial, param_name, param_distribution)
        if len(self._seen(study, self._round).finished) < self._n_startup_trials:
            return self._random_sampler.sample_independent(study, trial, param_name, param_distribution)
        return self._sample(study, trial, {param_name: param_distribution})[param_name]

    def _sample(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        if self._round is None:
            return super()._sample(study, trial, search_space)
        seen = self._seen(study, self._round)
        if (key := repr(search_space)) not in seen.fits:  # choices need not be hashable
            seen.fits[key] = self._fit(study, seen, search_space, self._round.trials)
        siblings = self._round.siblings
        with self._round.lock:  # `Study.optimize` with several jobs asks from several threads.
            others = {number: s for number, s in siblings.items() if self._constant_liar and number != trial.number}
            chosen = self._compare(*seen.fits[key].score(others))
        found = {name: distribution.to_external_repr(chosen[name]) for name, distribution in search_space.items()}
        siblings.setdefault(trial.number, _Sibling(trial)).drawn.update(found)
        return found

    def _seen(self, study: Study, round_: _Round) -> _Seen:
        """What this round knows of the study's trials; it is read once."""
        if round_.seen is None:
            # Of a bracket of the Hyperband pruner: Optuna's TPE learns from the trials of all brackets, too.
            study = getattr(study, "_study", study)
            trials = study._get_trials(deepcopy=False)
            finished = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
            running: list[FrozenTrial] = []
            if self._constant_liar:
                running = [t for t in trials if t.state == TrialState.RUNNING and t.number not in round_.siblings]
            best = self._best.setdefault(study.study_name, _Best())
            round_.seen = _Seen(finished, running, best.of(study, finished))
        return round_.seen

    def _fit(self, study: Study, seen: _Seen, space: Space, asks: int) -> _Fit:
        """The densities of the parameters in `space`, for at most `asks` trials."""
        if self._gamma is None:
            self._gamma = default_gamma if len(study.directions) <= 1 else default_gamma_multiobjective
        below, _ = _split_trials(study, seen.best, min(self._gamma(len(seen.finished)), KERNELS))
        numbers = {trial.number for trial in below}
        above = [t for t in seen.finished if t.number not in numbers and space.keys() <= t.params.keys()]
        above += [trial for trial in seen.running if space.keys() <= self._get_params(trial, study).keys()]
        above.sort(key=lambda trial: trial.number)
        parameters = self._parzen_estimator_parameters
        chosen, weights = _thinned(parameters.weights(len(above)), KERNELS)
        l_x = self._build_parzen_estimator(study, space, below, handle_below=True)
        observed = self._get_internal_repr([above[i] for i in chosen], space, study)
        g_x = _ParzenEstimator(observed, space, parameters, weights)
        # An estimator of nothing has its prior alone, with weight 1.
        total = float(weights.sum()) + parameters.prior_weight if len(weights) else 1.0
        return _Fit(g_x, total, space, observed, parameters, self._candidates(l_x, g_x, asks))

    def _candidates(self, l_x: _ParzenEstimator, g_x: _ParzenEstimator, asks: int) -> Iterator[Candidates]:
        """For each trial its own samples of l, with the logarithms of both densities there."""
        while True:
            trials = max(1, min(asks, BLOCK))
            asks -= trials
            samples = l_x.sample(self._rng.rng, trials * self._n_ei_candidates)
            log_l, log_g = l_x.log_pdf(samples), g_x.log_pdf(samples)
            for first in range(0, len(log_l), self._n_ei_candidates):
                own = slice(first, first + self._n_ei_candidates)
                yield {name: values[own] for name, values in samples.items()}, log_l[own], log_g[own]


def _thinned(weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights of at most `count` kernels for all: the latest half, and some that stand for older ones."""
    if len(weights) <= count:
        return np.arange(len(weights)), weights
    few = count // 2
    older, latest = np.split(weights, [few - count])
    chosen = np.searchsorted(np.cumsum(older), (np.arange(few) + 0.5) / few * older.sum())
    indices = np.append(chosen, np.arange(len(older), len(weights)))
    return indices, np.append(np.full(few, older.sum() / few), latest)


@dataclass
class _Best:
    """The `KERNELS` best of the finished trials, from round to round: only what is new has to be compared with them."""

    numbers: set[int] = field(default_factory=set)
    trials: list[FrozenTrial] = field(default_factory=list)

    def of(self, study: Study, finished: list[FrozenTrial]) -> list[FrozenTrial]:
        new = [trial for trial in finished if trial.number not in self.numbers]
        if new:
            self.numbers.update(trial.number for trial in new)
            self.trials = sorted([*self.trials, *new], key=lambda trial: trial.number)
            self.trials, _ = _split_trials(study, self.trials, KERNELS)
        return self.trials


@dataclass
class _Seen:
    """The trials that a round learns from, by number; `running` are those of others. Fits are made when needed."""

    finished: list[FrozenTrial]
    running: list[FrozenTrial]
    best: list[FrozenTrial]
    space: Space | None = None
    fits: dict[str, _Fit] = field(default_factory=dict)


@dataclass
class _Sibling:
    """A trial of a round. Optuna adds to `trial` what it is given; `drawn` is also what it has not yet asked for."""

    trial: FrozenTrial
    drawn: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        return self.drawn | self.trial.params


@dataclass
class _Round:
    """`trials` are how many may be asked for; `siblings` are those that were, by number."""

    trials: int
    siblings: dict[int, _Sibling] = field(default_factory=dict)
    seen: _Seen | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Fit:
    """What a round draws from; `observed` are the values behind g and, after them, the siblings'."""

    g_x: _ParzenEstimator
    total: float  # of the weights in g, the latest trial's being 1
    space: Space
    observed: dict[str, np.ndarray]
    parameters: _ParzenEstimatorParameters
    candidates: Iterator[Candidates]
    known: set[int] = field(default_factory=set)

    def score(self, siblings: dict[int, _Sibling]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Candidates for a trial, and log(l/g) of each, with a kernel in g for each of its siblings."""
        samples, log_l, log_g = next(self.candidates)
        for number in sorted(siblings.keys() - self.known):
            if self.space.keys() <= (params := siblings[number].params).keys():
                self.known.add(number)
                for name, distribution in self.space.items():
                    value = distribution.to_internal_repr(params[name])
                    self.observed[name] = np.append(self.observed[name], value)
        if not self.known:
            return samples, log_l - log_g
        return samples, log_l - np.logaddexp(log_g + np.log(self.total), self._log_siblings(samples))

    def _log_siblings(self, samples: dict[str, np.ndarray]) -> np.ndarray:
        """The logarithm of the sum of the siblings' kernels, each of weight 1, as the latest trials in g have it."""
        count = len(self.known)
        kernels = []
        for name, distribution in self.space.items():
            # Widths depend on the neighbours. The last kernel is the prior's.
            all_ = self.g_x._calculate_distributions(self.observed[name], name, distribution, self.parameters)
            fields = ("weights",) if hasattr(all_, "weights") else ("mu", "sigma")
            kernels.append(all_._replace(**{field: getattr(all_, field)[-1 - count : -1] for field in fields}))
        points = np.array([samples[name] for name in self.space]).T
        return _MixtureOfProductDistribution(np.ones(count), kernels).log_pdf(points)
