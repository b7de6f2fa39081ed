"""Everything that can be found wrong before a run writes anything: the study file, its data, the device, the flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tuner.clock import Stopwatch
from tuner.data import Data, prepare
from tuner.device import choose, is_lost, keep_host_memory
from tuner.errors import SpecError, TunerError, UsageError
from tuner.measure import best_lanes, machine, remembered, time_lanes
from tuner.plan import Plan, choose_threads, try_step, widest_search
from tuner.results import Target
from tuner.samplers import grid_cells
from tuner.spec import LoadedSpec, Space, explore, one_line
from tuner.storage import open_storage, resolve_url
from tuner.study import OpenedStudy, enqueue_grid, enqueue_points, open_study, read_points, target_of
from tuner.study_file import load_spec
from tuner.weights import default_folder

DEFAULT_PRUNER = "median"

ATTEMPTS = 3
"""So many samples are tried before a model is said not to work: one sample may be bad luck."""


@dataclass(frozen=True)
class Prepared:
    """All that was found out before the first trial, with nothing written yet; `notes` are lines for the user."""

    loaded: LoadedSpec
    space: Space
    target: Target
    data: Data
    plan: Plan
    url: str
    pruner: str
    notes: tuple[str, ...]


def prepare_run(
    study: str,
    storage: str | None,
    objectives: Sequence[str] | None,
    device_name: str,
    threads: int | None,
    workers: int,
    lanes: str,
    goal: int | None,
    pruner: str | None,
    watch: Stopwatch,
) -> Prepared:
    """Load and try everything. Raises `UsageError` with what was wanted, what was found and what to do."""
    url = resolve_url(storage, os.environ, Path.cwd())
    loaded = load_spec(study)
    space = explore(loaded)
    target = target_of(loaded.spec, objectives)
    several = len(target.names) > 1
    if several and pruner not in (None, "none"):
        raise UsageError(
            f"--pruner {pruner}: Optuna prunes no trial of a study with several objectives; say --pruner none"
        )
    # The parent of several workers leaves the device to them, and reads the data only to know their digest.
    choice = choose(device_name, touch=workers == 1)
    home = choice.device if workers == 1 else choose("cpu").device
    watch.lap("start")
    try:
        splits = loaded.spec.data()
    except TunerError:
        raise
    except Exception as error:
        raise SpecError(f"{loaded.origin}: data() raised {one_line(error)}") from error
    data = prepare(splits, home, loaded.origin)
    watch.lap("data")
    flops = _try_model(loaded, space, data, home)
    count, why = (threads, "as asked for") if threads is not None else choose_threads(choice.device, workers, flops)
    torch.set_num_threads(count)
    width, measured = _choose_lanes(loaded, space, data, home, lanes, count, widest_search(goal, workers), watch)
    plan = Plan(choice.device, workers, count, width, why)
    watch.lap("start")
    notes = [f"device: {choice.device}, {choice.why}", *data.notes, *measured]
    if several:
        notes.append("several objectives: no trial is pruned, and no learning curves are kept")
    return Prepared(
        loaded, space, target, data, plan, url, "none" if several else pruner or DEFAULT_PRUNER, tuple(notes)
    )


def open_prepared(ready: Prepared, study_name: str | None, points: Path | None, *, grid: bool) -> OpenedStudy:
    """Open storage and study; queue the points of a file and the cells of a grid."""
    queued = read_points(points, ready.space) if points is not None else []
    if grid:
        grid_cells(ready.space.distributions)  # where there is no grid, it says so before anything is made
    storage = open_storage(ready.url)
    opened = open_study(storage, ready.loaded, ready.space, ready.data.digest, ready.target, study_name)
    enqueue_points(opened.study, queued)
    if grid:
        enqueue_grid(storage, opened, ready.space)
    return opened


def weights_folder(url: str, asked: str | None) -> Path:
    """Where weights are kept: where it was `asked` for, else beside the storage.

    Raises `UsageError` where no directory can be made.
    """
    if asked is not None:
        folder = Path(asked).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            kind = "no directory" if not there.is_dir() else "no permission to write"
            raise UsageError(f"--weights {asked}: wanted a directory to write in; found {kind} at {there}")
        return folder
    return default_folder(url)


def _choose_lanes(
    loaded: LoadedSpec,
    space: Space,
    data: Data,
    device: torch.device,
    asked: str,
    threads: int,
    limit: int,
    watch: Stopwatch,
) -> tuple[int, list[str]]:
    """How many trials a worker trains at a time, as asked for or as measured, and what to say of it."""
    if asked != "auto":
        return int(asked), []
    keep_host_memory()
    watch.lap("start")
    widths = [width for width in (8, 16, 64) if width < limit] + [limit]
    jobs = [loaded.spec.job(number, h) for number, h in enumerate(space.samples)]
    if limit == 1:
        return 1, []
    key = f"{machine(device, threads)} {loaded.spec.name} {space.samples} {data.digest} {limit}"
    timings, before = remembered(key, lambda: time_lanes(loaded.spec.task(data, device), jobs, widths))
    watch.lap("plan")
    best = best_lanes(timings)
    ways = ", ".join(f"{t.lanes} lanes {timings[0].seconds / t.seconds:.1f}" for t in timings[1:])
    said = f"lanes: {best}; speed over lone trials: {ways or 'too few of the sampled ones are alike'}"
    return best, [f"{said} ({'measured before' if before else 'measured now'})"]


def _try_model(loaded: LoadedSpec, space: Space, data: Data, device: object) -> float:
    """Floating-point operations of a training step. Raises `SpecError` if the model works with none of some samples."""
    task = loaded.spec.task(data, device)
    failure: SpecError | None = None
    for hyperparameters in space.samples[:ATTEMPTS]:
        try:
            return try_step(loaded.spec.job(0, hyperparameters), task)
        except Exception as error:
            if is_lost(error):
                raise
            found = ", ".join(f"{name}={value!r}" for name, value in hyperparameters.items())
            failure = SpecError(f"{loaded.origin}: a training step with {found} raised {one_line(error)}")
            failure.__cause__ = error
    assert failure is not None
    raise failure
