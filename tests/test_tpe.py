"""TPE by rounds: Optuna's samples where a trial is alone, one fit for all that are asked for together, bounded cost."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.samplers._tpe.sampler import _split_trials, default_gamma, default_weights
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)
from optuna.trial import FrozenTrial, TrialState

from tests.study_files import study_file
from tuner import tpe
from tuner.run import main
from tuner.samplers import SAMPLERS, asked_together, sampler
from tuner.tpe import KERNELS, RoundTPESampler, tpe_sampler


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """How often an estimator is made, by the names of its parameters."""
    made: Counter[tuple[str, ...]] = Counter()
    init = _ParzenEstimator.__init__

    @functools.wraps(init)  # with its signature, at which `tpe_sampler` looks
    def counted(self: _ParzenEstimator, observations: Any, search_space: Any, *rest: Any) -> None:
        made[tuple(sorted(search_space))] += 1
        init(self, observations, search_space, *rest)

    monkeypatch.setattr(_ParzenEstimator, "__init__", counted)
    return made


def every_kind(trial: optuna.Trial) -> float:
    """Each kind of parameter, and two that only some trials have."""
    x = trial.suggest_float("x", -5, 5)
    rate = np.log(trial.suggest_float("rate", 1e-4, 1, log=True))
    count = trial.suggest_int("count", 1, 9) + np.log(trial.suggest_int("width", 1, 512, log=True))
    share = trial.suggest_float("share", 0, 1, step=0.1)
    kind = trial.suggest_categorical("kind", ["a", "b", None])
    inner = trial.suggest_float("inner", 0, 1) if kind == "a" else trial.suggest_int("depth", 1, 4) / 4
    return float(x**2 + rate**2 / 10 + count / 5 + share + inner + (kind == "b"))


def drive(made: TPESampler, directions: list[str], constrained: bool) -> list[FrozenTrial]:
    """70 trials, one by one: complete, pruned, failed, queued ones, and four that run until the end."""
    study = optuna.create_study(sampler=made, directions=directions)
    sign = 1 if directions[0] == "minimize" else -1
    for number in range(70):
        if number in (5, 40):
            study.enqueue_trial({"x": 0.5, "kind": "a"})
        with made.round(1) if isinstance(made, RoundTPESampler) else nullcontext():
            trial = study.ask()
            value = sign * every_kind(trial)
        if constrained:
            trial.set_constraint("small", trial.params["x"] - 1)
        if number in (12, 30, 31, 50):
            continue
        if number % 7 == 3 and len(directions) == 1:
            for step in range(number % 5):
                trial.report(value + step, step)
            study.tell(trial, state=TrialState.PRUNED)
        elif number % 11 == 5:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, [value, -value + trial.params["x"]][: len(directions)])
    return study.trials


@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
@pytest.mark.parametrize("directions", [["minimize"], ["maximize"], ["minimize", "maximize"]], ids="-".join)
def test_a_trial_alone_in_its_round_is_sampled_exactly_as_by_optuna(directions: list[str], constrained: bool) -> None:
    """Until a window is full, a round of one draws what Optuna's own sampler draws, whatever has happened before."""
    ours, theirs = (drive(made(seed=1), directions, constrained) for made in (RoundTPESampler, TPESampler))
    assert [t.params for t in ours] == [t.params for t in theirs]
    assert {t.state for t in ours} >= {TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING}


def test_outside_of_a_round_it_is_optunas_sampler() -> None:
    """`Study.optimize` gives the same trials with both."""
    found = []
    for made in (RoundTPESampler(seed=3), TPESampler(seed=3)):
        study = optuna.create_study(sampler=made)
        study.optimize(every_kind, n_trials=30)
        found.append([t.params for t in study.trials])
    assert found[0] == found[1]


def ask_together(study: optuna.Study, count: int, objective: Callable[[optuna.Trial], Any]) -> list[optuna.Trial]:
    """A round of `count` trials, all of which are told afterwards."""
    with asked_together(study.sampler, count):
        asked = []
        for _ in range(count):
            trial = study.ask()
            asked.append((trial, objective(trial)))
    for trial, value in asked:
        study.tell(trial, value)
    return [trial for trial, _ in asked]


def test_a_round_of_64_fits_once_and_its_trials_differ(fits: Counter[tuple[str, ...]]) -> None:
    """Two estimators, l and g, for what all trials have, and two for each parameter that only some have."""
    study = optuna.create_study(sampler=RoundTPESampler(seed=0))
    ask_together(study, 20, every_kind)
    assert not fits, "the first round is random"
    trials = ask_together(study, 64, every_kind)
    common = ("count", "kind", "rate", "share", "width", "x")
    assert fits == {common: 2, ("inner",): 2, ("depth",): 2}
    assert len({tuple(t.params.items()) for t in trials}) == 64
    assert len({t.params["x"] for t in trials}) == 64
    assert {"inner" in t.params for t in trials} == {True, False}
    ask_together(study, 64, every_kind)
    assert fits[common] == 4, "the next round has learned"


def test_the_same_seed_asks_for_the_same_rounds() -> None:
    """Rounds repeat."""
    found = []
    for _ in range(2):
        study = optuna.create_study(sampler=RoundTPESampler(seed=4))
        for count in (12, 16, 9):
            ask_together(study, count, every_kind)
        found.append([t.params for t in study.trials])
    assert found[0] == found[1]


def spread(made: TPESampler, seed: int) -> float:
    """Mean distance between neighbours among twelve siblings, after 30 trials of a bowl."""
    rng = np.random.RandomState(seed)
    space: dict[str, BaseDistribution] = {name: FloatDistribution(-1, 1) for name in ("x", "y")}
    study = optuna.create_study(sampler=made)
    for point in rng.uniform(-1, 1, (30, 2)):
        params = dict(zip(space, map(float, point), strict=True))
        study.add_trial(optuna.create_trial(params=params, distributions=space, value=float((point**2).sum())))
    with asked_together(made, 12):
        points = np.array([list(study.ask(space).params.values()) for _ in range(12)])
    distances = np.linalg.norm(points[:, None] - points, axis=-1) + 9 * np.eye(12)
    return float(distances.min(axis=1).mean())


def test_siblings_keep_apart_as_with_optunas_constant_liar() -> None:
    """Twelve siblings are as far from each other as when Optuna fits anew for each; without liars they are closer."""
    ours, theirs, without = (
        np.mean([spread(make(seed), seed) for seed in range(40)])
        for make in (
            lambda seed: RoundTPESampler(seed=seed),
            lambda seed: TPESampler(seed=seed),
            lambda seed: RoundTPESampler(seed=seed, constant_liar=False),
        )
    )
    assert 0.8 < ours / theirs < 1.25
    assert without < 0.85 * ours


def test_siblings_that_were_queued_or_ask_before_they_sample_are_known() -> None:
    """All asked first, then sampled; two of them are the user's own points. Each sibling is a kernel of g, once."""
    study = optuna.create_study(sampler=RoundTPESampler(seed=0))
    ask_together(study, 20, every_kind)
    for x in (0.25, 0.75):
        study.enqueue_trial({"x": x})
    space: dict[str, BaseDistribution] = {"x": FloatDistribution(-5, 5)}
    made = study.sampler
    assert isinstance(made, RoundTPESampler)
    with made.round(6):
        asked = [study.ask() for _ in range(6)]
        assert [trial.suggest_float("x", -5, 5) for trial in asked[:2]] == [0.25, 0.75]
        for trial in reversed(asked[2:]):
            made._sample(study, trial._cached_frozen_trial, space)
        assert made._round is not None
        assert made._round.seen is not None
        (fit,) = made._round.seen.fits.values()
    assert len(fit.observed["x"]) == 18 + 2 + 3


def test_a_queued_value_that_is_no_choice_fails_its_trial_alone() -> None:
    """The trial that asks for it raises, as in Optuna; its siblings are sampled. Choices may be lists."""
    study = optuna.create_study(sampler=RoundTPESampler(seed=0))

    def layers(trial: optuna.Trial) -> float:
        with pytest.warns(UserWarning, match="Choices for a categorical"):
            return float(len(trial.suggest_categorical("layers", [[8], [8, 8], [8, 8, 8]])))

    ask_together(study, 12, layers)
    study.enqueue_trial({"layers": "many"})
    with asked_together(study.sampler, 4):
        with pytest.raises(ValueError, match="many"):
            layers(study.ask())
        assert {layers(study.ask()) for _ in range(3)} <= {1.0, 2.0, 3.0}


def test_rounds_learn_as_well_as_optuna_asked_for_as_many_trials_at_once() -> None:
    """The median of the best of 60 trials, ten at a time, over 15 seeds; far below random search."""

    def bowl(trial: optuna.Trial) -> float:
        x, rate = trial.suggest_float("x", -5, 5), np.log10(trial.suggest_float("rate", 1e-5, 1, log=True))
        return float(x**2 + (rate + 2) ** 2 + 0.5 * trial.suggest_categorical("kind", [0, 1, 2]))

    def median(make: Callable[[int], BaseSampler]) -> float:
        best = []
        for seed in range(15):
            study = optuna.create_study(sampler=make(seed))
            for _ in range(6):
                ask_together(study, 10, bowl)
            best.append(study.best_value)
        return float(np.median(best))

    ours = median(lambda seed: RoundTPESampler(seed=seed))
    theirs = median(lambda seed: TPESampler(seed=seed))
    random = median(lambda seed: optuna.samplers.RandomSampler(seed=seed))
    assert ours < 2 * theirs
    assert ours < 0.5 * random


def test_rounds_of_two_objectives_find_more_of_the_front_than_chance() -> None:
    """The area that 90 trials dominate, in rounds of 15."""

    def two(trial: optuna.Trial) -> tuple[float, float]:
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)
        offset = 1 + 9 * y + 4 * trial.suggest_float("z", 0, 1)
        return x, float(offset * (1 - np.sqrt(x / offset)))

    def area(make: Callable[[int], BaseSampler]) -> float:
        areas = []
        for seed in range(5):
            study = optuna.create_study(sampler=make(seed), directions=["minimize", "minimize"])
            for _ in range(6):
                ask_together(study, 15, two)
            points = np.array([t.values for t in study.best_trials])
            areas.append(optuna._hypervolume.compute_hypervolume(points, np.array([1.0, 10.0])))
        return float(np.mean(areas))

    assert area(lambda seed: RoundTPESampler(seed=seed)) > 1.02 * area(
        lambda seed: optuna.samplers.RandomSampler(seed=seed)
    )


def test_rounds_keep_to_the_constraint() -> None:
    """The optimum is ruled out: trials gather where the best allowed one is, and so is the best."""

    def last_round(constrained: bool) -> list[float]:
        study = optuna.create_study(sampler=RoundTPESampler(seed=0))

        def bowl(trial: optuna.Trial) -> float:
            x = trial.suggest_float("x", -4, 4)
            if constrained:
                trial.set_constraint("outside", 1 - x)
            return x**2

        for _ in range(5):
            last = ask_together(study, 20, bowl)
        assert abs(study.best_trial.params["x"] - constrained) < 0.2
        return [t.params["x"] for t in last]

    assert sum(x >= 0.8 for x in last_round(constrained=True)) >= 10
    assert sum(x >= 0.8 for x in last_round(constrained=False)) <= 5


def filled(count: int, objectives: int = 1) -> optuna.Study:
    """A study of `count` trials at random places."""
    rng = np.random.RandomState(0)
    space: dict[str, BaseDistribution] = {
        "rate": FloatDistribution(1e-4, 1, log=True),
        "momentum": FloatDistribution(0, 0.99),
        "decay": FloatDistribution(1e-6, 1e-2, log=True),
        "batch_size": CategoricalDistribution([32, 64, 128]),
    }
    study = optuna.create_study(directions=["minimize"] * objectives, sampler=RoundTPESampler(seed=0))
    for _ in range(count):
        params = {
            "rate": float(np.exp(rng.uniform(np.log(1e-4), 0))),
            "momentum": rng.uniform(0, 0.99),
            "decay": float(np.exp(rng.uniform(np.log(1e-6), np.log(1e-2)))),
            "batch_size": int(rng.choice([32, 64, 128])),
        }
        values = [np.log(params["rate"]) ** 2, params["momentum"] + rng.rand()][:objectives]
        study._storage.create_new_trial(
            study._study_id, optuna.create_trial(params=params, distributions=space, values=values)
        )
    return study


@pytest.mark.parametrize("objectives", [1, 2])
def test_a_round_at_10000_trials_costs_hardly_more_than_at_100(objectives: int) -> None:
    """Processor seconds of a round of 64, the best of several: measured 1.2 to 2 times, at most 3."""

    def seconds(study: optuna.Study) -> float:
        space = study.get_trials(deepcopy=False)[0].distributions
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            with asked_together(study.sampler, 64):
                asked = [study.ask(space) for _ in range(64)]
            best = min(best, time.process_time() - started)
            for trial in asked:
                study.tell(trial, [1e3] * objectives)
        return best

    few, many = filled(100, objectives), filled(10_000, objectives)
    assert seconds(many) < 5 * seconds(few)
    assert isinstance(many.sampler, RoundTPESampler)
    (kept,) = many.sampler._best.values()
    assert len(kept.trials) == KERNELS


def test_the_best_are_those_of_all_trials_however_they_were_seen() -> None:
    """900 trials that end in another order than they start, seen in rounds: what is kept gives Optuna's split."""
    study = filled(900)
    trials = study.get_trials()
    order = np.random.RandomState(1).permutation(900)
    best = tpe._Best()
    for end in range(30, 901, 87):
        finished = sorted((trials[i] for i in order[:end]), key=lambda trial: trial.number)
        n_below = default_gamma(end)
        ours, _ = _split_trials(study, best.of(study, finished), n_below)
        theirs, _ = _split_trials(study, finished, n_below)
        assert [t.number for t in ours] == [t.number for t in theirs]


def test_few_kernels_stand_for_many_with_their_weight() -> None:
    """The latest half is kept as it is; the older ones are represented from all times, with their weight."""
    weights = default_weights(10_000)
    chosen, kept = tpe._thinned(weights, 500)
    assert len(chosen) == len(kept) == 500
    assert list(chosen[250:]) == list(range(9750, 10_000))
    assert (np.diff(chosen) > 0).all()
    assert kept[250:].tolist() == weights[-250:].tolist()
    assert kept.sum() == pytest.approx(weights.sum())
    # The ramp of the weights rises to 1 at the latest trial: their mean is at two thirds.
    assert np.average(chosen, weights=kept) == pytest.approx(np.average(np.arange(10_000), weights=weights), rel=1e-3)
    few = default_weights(500)
    chosen, kept = tpe._thinned(few, 500)
    assert (chosen.tolist(), kept.tolist()) == (list(range(500)), few.tolist())


def test_an_optuna_with_another_inside_gets_its_own_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private function that is missing, or takes other arguments; an attribute that is gone."""
    assert type(tpe_sampler(0)) is RoundTPESampler
    with monkeypatch.context() as patch:
        patch.delattr(TPESampler, "_get_internal_repr")
        assert type(tpe_sampler(0)) is TPESampler
    with monkeypatch.context() as patch:
        patch.setattr(TPESampler, "_sample", lambda self, study, trials: None)
        assert type(sampler("tpe", 0)) is TPESampler
    with monkeypatch.context() as patch:
        patch.delattr(_ParzenEstimator, "_calculate_distributions")
        assert type(tpe_sampler(0)) is TPESampler
    assert type(sampler("tpe", 0)) is RoundTPESampler


def test_a_module_that_is_missing_does_not_keep_the_package_from_loading() -> None:
    """Without `_split_trials`, `tuner.samplers` loads, and gives Optuna's sampler."""
    code = """
import optuna
from optuna.samplers._tpe import sampler as inside
del inside._split_trials
from tuner.samplers import asked_together, sampler
made = sampler("tpe", 0)
assert type(made) is optuna.samplers.TPESampler, made
study = optuna.create_study(sampler=made)
with asked_together(made, 2):
    print([study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}).params for _ in range(2)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "x" in done.stdout


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_can_be_asked_together(name: str) -> None:
    """For those that learn nothing by it, a round is nothing."""
    study = optuna.create_study(sampler=sampler(name, 1))
    trials = ask_together(study, 12, lambda trial: trial.suggest_float("x", 0, 1))
    assert len({t.params["x"] for t in trials}) == 12


def test_a_run_fits_once_for_each_round_of_its_lanes(
    tmp_path: Path, fits: Counter[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 lanes, 36 trials: the first round is random, two have fits."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    study_file(tmp_path, spec='name="tiny", epochs=1')
    arguments = "--study tiny.py --n-trials 36 --lanes 12 --pruner none --seed 0".split()
    fits.clear()
    assert main(arguments) == 0
    assert list(fits.values()) == [4]


class EachInARound(RoundTPESampler):
    """Every trial that is asked for begins a round."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._round = tpe._Round(1)
        super().before_trial(study, trial)


class TestConformance(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    """Optuna's own tests for samplers."""

    @pytest.fixture(
        params=[
            lambda: EachInARound(n_startup_trials=0),
            lambda: EachInARound(n_startup_trials=0, multivariate=False),
        ],
        ids=["together", "independent"],
    )
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        make: Callable[[], BaseSampler] = request.param
        return make
