"""Open a spec's study: create it, or resume it if what is stored and what is asked for are the same study.

A study keeps a fingerprint of what its trials have in common (objectives, search space, data, epochs, seed). Another
one would mix trials that cannot be compared, so it is refused before the first trial.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
    json_to_distribution,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tuner.errors import StudyMismatchError, UsageError
from tuner.owner import is_gone
from tuner.results import NUMBERS, WORKER, Summary, Target, summarize
from tuner.samplers import grid_cells
from tuner.spec import LoadedSpec, Space, StudySpec, quiet_optuna
from tuner.storage import Storage, masked, start_lock

FINGERPRINT = "tuner:fingerprint"
RUNS = "tuner:runs"


@dataclass(frozen=True)
class OpenedStudy:
    """A study that is ready for trials; `run` counts the commands that opened it before this one."""

    study: optuna.Study
    storage: Storage
    study_id: int
    resumed: bool
    run: int
    summary: Summary


def target_of(spec: StudySpec, objectives: Sequence[str] | None = None) -> Target:
    """What is optimized: the spec's objective, or ``name`` / ``name:maximize`` from a command line.

    Raises `UsageError` for names that nothing measures.
    """
    if not objectives:
        return Target((spec.objective,), (spec.direction == "maximize",))
    times = ("wall_time", "device_seconds", "epochs", "peak_memory_mb")
    known = {"loss": False, **dict.fromkeys(times, False), spec.objective: spec.direction == "maximize"}
    names, maximize = [], []
    for text in objectives:
        name, _, direction = text.partition(":")
        if name not in ("loss", *times, *spec.metrics) or direction not in ("", "minimize", "maximize"):
            measures = ", ".join(("loss", *spec.metrics, *times))
            raise UsageError(f"--objectives {text}: wanted one of {measures}, with :minimize or :maximize behind it")
        if not direction and name not in known:
            raise UsageError(f"--objectives {name}: say {name}:maximize or {name}:minimize")
        names.append(name)
        maximize.append(direction == "maximize" if direction else known[name])
    if len(set(names)) < len(names):
        raise UsageError(f"--objectives {' '.join(objectives)}: each objective once")
    return Target(tuple(names), tuple(maximize))


def open_study(
    storage: Storage,
    loaded: LoadedSpec,
    space: Space,
    data_digest: str,
    target: Target,
    name: str | None = None,
) -> OpenedStudy:
    """Create or resume the study; raises `StudyMismatchError` if it is another one, and then changes nothing."""
    name = name or loaded.spec.name
    fingerprint = {
        "objectives": [
            f"{name}:{'maximize' if up else 'minimize'}" for name, up in zip(target.names, target.maximize, strict=True)
        ],
        "space": {name: distribution_to_json(d) for name, d in sorted(space.distributions.items())},
        "data": data_digest,
        "epochs": loaded.spec.epochs,
        "seed": loaded.spec.seed,
    }
    with start_lock(storage.given_url), quiet_optuna():
        directions = [StudyDirection.MAXIMIZE if up else StudyDirection.MINIMIZE for up in target.maximize]
        try:
            study = optuna.load_study(study_name=name, storage=storage)
            resumed = True
        except KeyError:
            study = optuna.create_study(study_name=name, storage=storage, directions=directions)
            resumed = False
        study_id = storage.get_study_id_from_name(name)
        trials = study.get_trials(deepcopy=False)
        stored = storage.get_study_system_attrs(study_id)
        if resumed:
            differences = _differences(study, trials, directions, stored.get(FINGERPRINT), fingerprint, space)
            if differences:
                raise StudyMismatchError(
                    f"study {name!r} in {masked(storage.given_url)} is not the one that {loaded.origin} describes now:"
                    f" {'; '.join(differences)}. Start a new one with --study-name, or undo the change"
                )
        if FINGERPRINT not in stored:
            storage.set_study_system_attr(study_id, FINGERPRINT, fingerprint)  # type: ignore[arg-type]
            _describe(study, loaded, target)
        run = int(stored.get(RUNS, 0))
        storage.set_study_system_attr(study_id, RUNS, run + 1)
    return OpenedStudy(study, storage, study_id, resumed, run, summarize(trials, target.maximize[0]))


def read_points(file: Path, space: Space) -> list[dict[str, Any]]:
    """The points of a JSON file (a list of dictionaries, or one), checked against the space. Raises `UsageError`."""
    try:
        points = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--enqueue {file}: wanted a JSON file; found: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--enqueue {file}: wanted a JSON list of dictionaries; {error}") from error
    points = points if isinstance(points, list) else [points]
    for point in points:
        if not isinstance(point, dict):
            raise UsageError(f"--enqueue {file}: wanted dictionaries of parameters; found {json.dumps(point)}")
        for name, value in point.items():
            _check_point(f"--enqueue {file}", name, value, space.distributions)
    return points


def enqueue_points(study: optuna.Study, points: Sequence[dict[str, Any]]) -> None:
    """Queue known points; they are the next trials, of whichever worker asks first."""
    for point in points:
        study.enqueue_trial(point)


def enqueue_grid(storage: Storage, opened: OpenedStudy, space: Space) -> int:
    """Queue each cell of the grid that the study has not yet met; returns how many cells were added."""
    cells = grid_cells(space.distributions)
    with start_lock(storage.given_url):
        trials = opened.study.get_trials(deepcopy=False)
        met = [t.system_attrs.get("fixed_params", t.params) for t in trials if t.state != TrialState.FAIL]
        known = {json.dumps(cell, sort_keys=True) for cell in met}
        new = [cell for cell in cells if json.dumps(cell, sort_keys=True) not in known]
        for cell in new:
            opened.study.enqueue_trial(cell)
    return len(new)


def _check_point(origin: str, name: str, value: Any, distributions: Mapping[str, BaseDistribution]) -> None:
    if name not in distributions:
        raise UsageError(f"{origin}: no parameter {name!r}; the search space has {', '.join(sorted(distributions))}")
    try:
        distribution = distributions[name]
        inside = distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        inside = False
    if not inside:
        raise UsageError(f"{origin}: {name} = {json.dumps(value)} is outside {describe(distributions[name])}")


def describe(distribution: BaseDistribution) -> str:
    """A distribution as a person reads it: ``0.001 to 1.0 (log)``, ``one of 32, 64``."""
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return f"one of {', '.join(map(str, distribution.choices))}"
    assert isinstance(distribution, (optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution))
    step = distribution.step if distribution.step not in (None, 1) else None
    extra = [word for word in ("log" if distribution.log else "", f"step {step}" if step else "") if word]
    kind = "whole numbers " if isinstance(distribution, optuna.distributions.IntDistribution) else ""
    return f"{kind}{distribution.low} to {distribution.high}{f' ({chr(44).join(extra)})' if extra else ''}"


def _differences(
    study: optuna.Study,
    trials: Sequence[optuna.trial.FrozenTrial],
    directions: Sequence[StudyDirection],
    stored: Mapping[str, Any] | None,
    wanted: Mapping[str, Any],
    space: Space,
) -> list[str]:
    """What a resumed study and the study file disagree on, in words."""
    if list(study.directions) != list(directions):
        was, now = (" and ".join(d.name.lower() for d in ds) for ds in (study.directions, directions))
        return [f"it was to {was}, now {now}"]
    if stored is None:
        return _incompatible(trials, space)
    found = [
        f"{key} were {stored[key]}, now {wanted[key]}" for key in ("objectives", "epochs") if stored[key] != wanted[key]
    ]
    if stored["seed"] != wanted["seed"]:
        found.append(f"the training's seed was {stored['seed']}, now {wanted['seed']}")
    if stored["data"] != wanted["data"]:
        found.append("the data are others")
    for name in sorted({*stored["space"], *wanted["space"]}):
        was, now = stored["space"].get(name), wanted["space"].get(name)
        if was != now:
            words = [describe(json_to_distribution(d)) if d else "not there" for d in (was, now)]
            found.append(f"{name} was {words[0]}, now {words[1]}")
    return found


def _incompatible(trials: Sequence[optuna.trial.FrozenTrial], space: Space) -> list[str]:
    """For a study that plain Optuna began: parameters that Optuna itself could not continue."""
    found = {}
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if name not in space.distributions or name in found:
                continue
            try:
                check_distribution_compatibility(distribution, space.distributions[name])
            except ValueError:
                found[name] = f"{name} was {describe(distribution)}, now {describe(space.distributions[name])}"
    return list(found.values())


def _describe(study: optuna.Study, loaded: LoadedSpec, target: Target) -> None:
    """What the dashboard shows of the study: names for its values, and a note."""
    with warnings.catch_warnings():
        # "Experimental" in Optuna since 3.2; the dashboard shows these names.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(target.labels)
    study.set_user_attr("study file", loaded.source)
    # Imported here: it brings a web server along, which only the creation of a study needs.
    from optuna_dashboard import save_note

    measures = ", ".join(f"validation {name}" for name in ("loss", *loaded.spec.metrics))
    note = f"""{loaded.description}

Each trial trains with SGD for {loaded.spec.epochs} epochs; its value is its best {target.labels[0]} over them, its
learning curve that value at every epoch. A trial's attributes say what else was measured ({measures}, at its best
epoch)
and where its wall time went, in seconds: {", ".join(NUMBERS[:6])}.
"""
    save_note(study, note)


def may_get_room(study: optuna.Study, storage: Storage) -> bool:
    """Whether a trial may yet start within the study's total; trials whose process is gone are ended first."""
    limit = storage.total_limit
    if limit is None:
        return False
    end_orphans(study, storage)
    if storage.queued_only and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return False
    return storage.finished_count(study._study_id)[0] < limit


def end_orphans(study: optuna.Study, storage: Storage) -> None:
    """End the trials whose process, on this host, is gone: samplers and budgets would count them as running."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for owner in {trial.user_attrs.get(WORKER, "") for trial in running}:
        if is_gone(owner):
            storage.fail_trials_of(study._study_id, owner, "its process is gone")
