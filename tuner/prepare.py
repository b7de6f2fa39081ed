"""Everything that can be found wrong before a run writes anything: the study file, its data, the device, the flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tuner.assemble import Assembler
from tuner.clock import Stopwatch
from tuner.data import Data, prepare
from tuner.device import choose as choose_device
from tuner.device import cores, is_lost, is_out_of_memory, keep_host_memory, set_precision
from tuner.errors import SpecError, TunerError, UsageError
from tuner.measure import machine, remembered, time_ways
from tuner.plan import DEVICE_WIDTHS, WIDTHS, Plan, Scope, Timing, choose, try_step
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

WORTH_STARTS = 10
"""More than one worker is worth it in a run that lasts this many times as long as a worker takes to start."""


@dataclass(frozen=True)
class Prepared:
    """All that was found out before the first trial, with nothing written yet; `notes` are lines for the user."""

    loaded: LoadedSpec
    space: Space
    target: Target
    data: Data
    plan: Plan
    timings: tuple[Timing, ...]
    assembler: Assembler | None
    url: str
    pruner: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wishes:
    """What the command line says of the plan; None is for the plan to choose.

    `goal` is the number of trials to come, None where nobody knows, and `timeout` the seconds they have; `learning`
    says whether what is sampled depends on trials that have ended; `repeatable` that the same command must sample the
    same again.
    """

    device: str
    workers: int | None
    threads: int | None
    lanes: int | None
    precision: str
    goal: int | None
    timeout: float | None
    learning: bool
    repeatable: bool


def prepare_run(
    study: str,
    storage: str | None,
    objectives: Sequence[str] | None,
    pruner: str | None,
    wishes: Wishes,
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
    # The parent of several workers leaves an accelerator to them, and reads the data only to know their digest.
    single = wishes.workers in (None, 1)
    choice = choose_device(wishes.device, touch=single)
    home = choice.device if single else choose_device("cpu").device
    watch.lap("start")
    try:
        splits = loaded.spec.data()
    except TunerError:
        raise
    except Exception as error:
        raise SpecError(f"{loaded.origin}: data() raised {one_line(error)}") from error
    data = prepare(splits, home, loaded.origin)
    watch.lap("data")
    set_precision(wishes.precision)
    flops = _try_model(loaded, space, data, home, wishes.precision)
    keep_host_memory()
    watch.lap("start")
    plan, timings, said, assembler = _make_plan(loaded, space, data, choice.device, home, flops, wishes, watch)
    torch.set_num_threads(plan.threads)
    watch.lap("plan")
    notes = [f"device: {choice.device}, {choice.why}", *data.notes, *said]
    if several:
        notes.append("several objectives: no trial is pruned, and no learning curves are kept")
    pruner = "none" if several else pruner or DEFAULT_PRUNER
    return Prepared(loaded, space, target, data, plan, timings, assembler, url, pruner, tuple(notes))


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


def _make_plan(
    loaded: LoadedSpec,
    space: Space,
    data: Data,
    device: torch.device,
    home: torch.device,
    step_flops: float,
    wishes: Wishes,
    watch: Stopwatch,
) -> tuple[Plan, tuple[Timing, ...], list[str], Assembler | None]:
    """The plan as asked for and as measured, what was measured, what to say of it, and who knows recorded programs."""
    on_cpu = device.type == "cpu"
    most = cores() if on_cpu else 1
    start = watch.totals.get("start", 0.0) + watch.totals.get("data", 0.0)
    # What several workers sample comes in an order that nobody repeats: not where the same is wanted again.
    single = not on_cpu or wishes.repeatable or (wishes.timeout is not None and wishes.timeout < WORTH_STARTS * start)
    workers = [wishes.workers or 1] if wishes.workers or single else sorted({1, most})
    room = max(1, most // max(wishes.workers or 1, 1))
    scope = Scope(
        goal=wishes.goal,
        epochs=loaded.spec.epochs,
        workers=workers,
        threads=[wishes.threads] if wishes.threads else sorted({1, room}),
        lanes=[wishes.lanes] if wishes.lanes else (1, *WIDTHS, *(() if on_cpu else DEVICE_WIDTHS)),
        learning=wishes.learning,
        start=start,
        step_flops=step_flops,
    )
    if all(len(ways) == 1 for ways in (scope.workers, scope.threads, scope.lanes)):
        chosen = (scope.workers[0], scope.threads[0], scope.lanes[0], wishes.precision)
        return Plan(device, *chosen, "as asked for"), (), [], None
    jobs = [loaded.spec.job(number, h) for number, h in enumerate(space.samples)]
    # With all that is asked for: the same command gets the same plan again.
    key = f"{machine(home)} {wishes} {loaded.spec.name} {step_flops} {space.samples} {data.digest}"
    task = loaded.spec.task(data, home, wishes.precision)
    assembler = Assembler(task)
    timings, before = remembered(key, lambda: time_ways(task, jobs, scope, assembler))
    best = choose(timings, scope)
    why = ("measured before" if before else "measured now") if timings else "no sampled trial could be timed"
    plan = Plan(device, best.workers, best.threads, best.lanes, wishes.precision, why)
    return plan, tuple(timings), [_compared(timings, scope)] if timings else [], assembler


def _compared(timings: Sequence[Timing], scope: Scope) -> str:
    """What was measured, in one line."""
    base = min(timings, key=lambda timing: (timing.lanes, timing.threads))
    ways = []
    for timing in timings:
        if timing is not base:
            threads = f" on {timing.threads} threads" if timing.threads > 1 else ""
            lanes = f"{timing.lanes} lanes" if timing.lanes > 1 else "1 lane"
            ways.append(f"{lanes}{threads} {base.seconds / timing.seconds:.1f}")
    alone = f"{base.lanes} lane{'s' if base.lanes > 1 else ''}"
    few = "too few of the sampled trials are alike for stacks" if max(scope.lanes) > 1 else "nothing else was timed"
    return f"speed of a worker over {alone} on {base.threads} thread: {', '.join(ways) or few}"


def _try_model(loaded: LoadedSpec, space: Space, data: Data, device: torch.device, precision: str) -> float:
    """Floating-point operations of a training step. Raises `SpecError` if the model works with none of some samples."""
    task = loaded.spec.task(data, device, precision)
    failure: SpecError | None = None
    for hyperparameters in space.samples[:ATTEMPTS]:
        try:
            return try_step(loaded.spec.job(0, hyperparameters), task)
        except Exception as error:
            if is_lost(error):
                raise
            if is_out_of_memory(error):
                continue  # The search trains with fewer examples at a time, or ends the trial with the figure.
            found = ", ".join(f"{name}={value!r}" for name, value in hyperparameters.items())
            failure = SpecError(f"{loaded.origin}: a training step with {found} raised {one_line(error)}")
            failure.__cause__ = error
    if failure is None:
        return float("inf")  # None fits: as large as can be.
    raise failure
