"""Tune: ``python -m tuner.run --n-trials 50``. Parses, prepares, listens to the search, prints what came out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from tuner.clock import Stopwatch
from tuner.errors import Interrupted, TunerError
from tuner.options import added_trials, check, parser, wishes_of

if TYPE_CHECKING:
    from tuner.assignment import Assignment, CountedBudget
    from tuner.interrupt import Interrupt
    from tuner.outcome import Ledger, Outcome
    from tuner.prepare import Prepared
    from tuner.results import Event
    from tuner.study import OpenedStudy


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
    stdout = sys.stdout
    with interrupt.listening(), redirect_stdout(sys.stderr):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            with interrupt.interruptible():
                ready = prepare_run(args.study, args.storage, args.objectives, args.pruner, wishes_of(args), watch)
            if args.plan == "show":
                table = outcome.plan_as_json(ready) if args.json else outcome.plan_as_text(ready)
                print(table, file=stdout)
                return 0
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
        precision=ready.plan.precision,
        sampler=args.sampler,
        pruner=ready.pruner,
        threshold=args.threshold,
        seed=args.seed,
        run=opened.run,
        total_limit=args.total_trials,
        weights=str(weights),
    )
    return opened, assignment, CountedBudget.until(added_trials(args), args.timeout)


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

    if ready.plan.workers > 1:
        return run_workers(assignment, ready.plan.workers, budget, interrupt)
    return make_search(
        assignment,
        ready.loaded,
        ready.data,
        ready.plan.device,
        budget,
        watch,
        interrupt,
        storage=opened.storage,
        assembler=ready.assembler,
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
