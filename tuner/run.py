"""Tune: ``python -m tuner.run --n-trials 50``. Parses, prepares, listens to the search, prints what came out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tuner.clock import Stopwatch
from tuner.errors import Interrupted, TunerError, UsageError

if TYPE_CHECKING:
    from tuner.assignment import Assignment, CountedBudget
    from tuner.interrupt import Interrupt
    from tuner.outcome import Ledger, Outcome
    from tuner.prepare import Prepared
    from tuner.results import Event
    from tuner.study import OpenedStudy

DEFAULT_TRIALS = 50

FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "what is tuned": {
        "--study": {
            "default": "digits_mlp",
            "help": "a name (see --list-studies), a path to a file, or module:attribute (default: digits_mlp)",
        },
        "--list-studies": {"action": "store_true", "help": "the studies that come along, then stop"},
        "--study-name": {"help": "its name in the storage (default: the study file's)"},
        "--objectives": {
            "nargs": "+",
            "metavar": "NAME",
            "help": "one or more of: loss, a metric, wall_time, device_seconds; NAME:maximize or NAME:minimize"
            " (default: the study file's)",
        },
    },
    "where": {
        "--storage": {"help": "a SQLite file or a database URL (default: OPTUNA_STORAGE, else tuner.db here)"},
        "--device": {"default": "auto", "help": "auto, cpu, cuda, cuda:1, mps or xpu (default: auto)"},
        "--threads": {"type": int, "help": "CPU threads of each worker (default: by the size of a step)"},
        "--workers": {"type": int, "default": 1, "help": "processes that train at the same time (default: 1)"},
        "--lanes": {
            "default": "auto",
            "help": "trials that a worker trains together: auto, or a number (default: auto, measured)",
        },
        "--weights": {"metavar": "DIR", "help": "where the best trial's weights are kept (default: by the storage)"},
    },
    "how much": {
        "--n-trials": {"type": int, "help": f"add this many trials (default: {DEFAULT_TRIALS})"},
        "--total-trials": {
            "type": int,
            "help": "stop when the study holds this many complete or pruned trials, however many commands share it",
        },
        "--timeout": {"type": float, "metavar": "SECONDS", "help": "start no trial after this time"},
    },
    "how the search goes": {
        "--sampler": {"default": "tpe", "help": "tpe, gp, cmaes, random, qmc, grid or nsgaii (default: tpe)"},
        "--pruner": {"help": "none, median, halving, hyperband, patient or threshold (default: median)"},
        "--threshold": {"type": float, "help": "the value that --pruner threshold lets no trial be worse than"},
        "--seed": {"type": int, "help": "the sampler's: one worker repeats a new study's trials with it"},
        "--enqueue": {"type": Path, "metavar": "FILE", "help": "start from the points of a JSON file"},
    },
    "what is printed": {
        "--json": {"action": "store_true", "help": "print the result as one JSON document"},
        "--debug": {"action": "store_true", "help": "show tracebacks"},
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    watch = Stopwatch()
    args = parser().parse_args(argv)
    try:
        check(args)
        if args.list_studies:
            return list_studies()
        return tune(args, watch)
    except TunerError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


class _Parser(argparse.ArgumentParser):
    """argparse, with errors like all others: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = _Parser(
        prog="python -m tuner.run",
        description="Tune a PyTorch model's hyperparameters. A study that is there already is resumed.",
        epilog="Results go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,"
        " 3 no trial completed, 130 interrupted, 143 terminated.",
    )
    for title, flags in FLAGS.items():
        group = p.add_argument_group(title)
        for flag, settings in flags.items():
            group.add_argument(flag, **settings)
    return p


def check(args: argparse.Namespace) -> None:
    """Refuse what makes no sense before anything is loaded."""
    from tuner.samplers import PRUNERS, SAMPLERS

    for flag, lowest in (("n_trials", 0), ("total_trials", 0), ("threads", 1), ("workers", 1), ("timeout", 0)):
        value = getattr(args, flag)
        if value is not None and not value >= lowest:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: wanted a number from {lowest}")
    if args.lanes != "auto" and not (args.lanes.isdigit() and int(args.lanes) > 0):
        raise UsageError(f"--lanes {args.lanes}: wanted auto, or a number from 1")
    if args.sampler not in SAMPLERS:
        raise UsageError(f"--sampler {args.sampler}: wanted one of {', '.join(SAMPLERS)}")
    if args.pruner not in (None, *PRUNERS):
        raise UsageError(f"--pruner {args.pruner}: wanted one of {', '.join(PRUNERS)}")
    if args.threshold is not None and args.pruner != "threshold":
        raise UsageError("--threshold: only --pruner threshold has one; say both, or neither")
    if args.study_name == "":
        raise UsageError("--study-name: wanted a name, found an empty text")
    if args.pruner == "threshold" and args.threshold is None:
        raise UsageError("--pruner threshold: also say --threshold VALUE, which no trial may be worse than")
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise UsageError("WORLD_SIZE is above 1: a trial has one device here; start the command once, not by torchrun")


def list_studies() -> int:
    from tuner.study_file import list_specs

    studies = list_specs()
    width = max((len(name) for name, _ in studies), default=0)
    for name, first_line in studies:
        print(f"{name:{width}}  {first_line}")
    return 0


def tune(args: argparse.Namespace, watch: Stopwatch) -> int:
    """Prepare, search, and print the outcome; returns the exit code."""
    # Imported here: `--help` is there at once, and torch takes seconds.
    import optuna

    from tuner import outcome
    from tuner.interrupt import Interrupt
    from tuner.prepare import prepare_run

    interrupt = Interrupt()
    signal_number = 0
    trouble: TunerError | None = None
    with interrupt.listening(), redirect_stdout(sys.stderr):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            with interrupt.interruptible():
                ready = prepare_run(
                    args.study,
                    args.storage,
                    args.objectives,
                    args.device,
                    args.threads,
                    args.workers,
                    args.lanes,
                    goal_of(args),
                    args.pruner,
                    watch,
                )
            opened, assignment, budget = open_run(args, ready)
        except Interrupted as error:
            return error.exit_code
        watch.lap("storage")
        ledger = outcome.Ledger(watch)
        try:
            events = search(args, ready, opened, assignment, budget, watch, interrupt)
            show(args, ready, opened, budget, events, ledger)
        except Interrupted as error:
            signal_number = error.signal_number
        except TunerError as error:
            if args.debug:
                raise
            trouble = error
    result = outcome.measure(ready, assignment, opened, ledger, args.total_trials)
    print(outcome.as_json(result) if args.json else "\n".join(outcome.as_text(result)))
    return verdict(result, signal_number, trouble)


def open_run(args: argparse.Namespace, ready: Prepared) -> tuple[OpenedStudy, Assignment, CountedBudget]:
    """Open the storage and the study, queue what is to be queued, and say who does what."""
    from tuner.assignment import Assignment, CountedBudget
    from tuner.prepare import open_prepared, weights_folder

    weights = weights_folder(ready.url, args.weights)
    opened = open_prepared(ready, args.study_name, args.enqueue, grid=args.sampler == "grid")
    assignment = Assignment(
        source=ready.loaded.source,
        url=ready.url,
        study_name=opened.study.study_name,
        target=ready.target,
        device=args.device,
        threads=ready.plan.threads,
        lanes=ready.plan.lanes,
        sampler=args.sampler,
        pruner=ready.pruner,
        threshold=args.threshold,
        seed=args.seed,
        run=opened.run,
        total_limit=args.total_trials,
        weights=str(weights),
    )
    return opened, assignment, CountedBudget.until(added_trials(args), args.timeout)


def added_trials(args: argparse.Namespace) -> int | None:
    """How many trials this command may start, None: any number."""
    if args.n_trials is None and args.total_trials is None and args.timeout is None and args.sampler != "grid":
        return DEFAULT_TRIALS
    return int(args.n_trials) if args.n_trials is not None else None


def goal_of(args: argparse.Namespace) -> int | None:
    """How many trials this command starts at most, before the study has been looked at."""
    counts = [count for count in (added_trials(args), args.total_trials) if count is not None]
    return min(counts) if counts else None


def search(
    args: argparse.Namespace,
    ready: Prepared,
    opened: OpenedStudy,
    assignment: Assignment,
    budget: CountedBudget,
    watch: Stopwatch,
    interrupt: Interrupt,
) -> Iterator[Event]:
    """The events of one worker in this process, or of several in their own."""
    from tuner.assignment import make_search
    from tuner.workers import run_workers

    if args.workers > 1:
        return run_workers(assignment, args.workers, budget, interrupt)
    return make_search(
        assignment, ready.loaded, ready.data, ready.plan.device, budget, watch, interrupt, storage=opened.storage
    ).events()


def show(
    args: argparse.Namespace,
    ready: Prepared,
    opened: OpenedStudy,
    budget: CountedBudget,
    events: Iterator[Event],
    ledger: Ledger,
) -> None:
    """Listen to the search, and show it on stderr."""
    from tuner.display import open_display
    from tuner.outcome import first_lines

    goal = budget.trials
    if args.total_trials is not None:
        left = max(0, args.total_trials - opened.summary.done)
        goal = left if goal is None else min(goal, left)
    for line in first_lines(ready, opened, args.sampler, goal, args.timeout):
        print(line, file=sys.stderr)
    display = open_display(
        sys.stderr,
        os.environ,
        objective=", ".join(ready.target.labels),
        maximize=ready.target.maximize[0],
        goal=goal,
        device=ready.plan.text,
        start=opened.summary,
    )
    with display:
        for event in events:
            ledger.add(event)
            display.update(event)


def verdict(result: Outcome, signal_number: int, trouble: TunerError | None) -> int:
    """The exit code, with its reason on stderr."""
    if signal_number:
        print(f"interrupted; resume with: {result.commands['resume']}", file=sys.stderr)
        return 128 + signal_number
    if trouble is not None:
        print(f"error: {trouble}", file=sys.stderr)
        return trouble.exit_code
    if result.complete == 0 and result.added:
        print("error: no trial of the study is complete; the reasons are in the list above", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
