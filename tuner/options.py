"""The command line of ``python -m tuner.run``: its flags, what makes no sense among them, and what they ask for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.prepare import Wishes

DEFAULT_TRIALS = 50

MOST_WORKERS = 16
"""For each core: more is a mistake, and would bring the machine to a halt."""


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
        "--workers": {
            "default": "auto",
            "metavar": "N",
            "help": "processes that train at the same time: auto, or a number (default: auto, measured)",
        },
        "--threads": {
            "default": "auto",
            "metavar": "N",
            "help": "CPU threads of each worker: auto, or a number (default: auto, measured)",
        },
        "--lanes": {
            "default": "auto",
            "metavar": "N",
            "help": "trials that a worker trains together: auto, or a number (default: auto, measured)",
        },
        "--precision": {
            "choices": ["float32", "tf32", "bf16"],
            "default": "float32",
            "help": "of matrix products: float32, tf32 (NVIDIA GPUs) or bf16 (default: float32)",
        },
        "--plan": {
            "choices": ["auto", "show"],
            "default": "auto",
            "help": "show: print what was measured and what would be chosen, and stop (default: auto)",
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

    for flag, lowest in (("n_trials", 0), ("total_trials", 0), ("timeout", 0)):
        value = getattr(args, flag)
        if value is not None and not value >= lowest:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: wanted a number from {lowest}")
    for flag in ("workers", "threads", "lanes"):
        text = getattr(args, flag)
        if text != "auto" and not (text.isdigit() and int(text) > 0):
            raise UsageError(f"--{flag} {text}: wanted auto, or a number from 1")
    cores = os.cpu_count() or 1
    for flag, most in (("threads", cores), ("workers", MOST_WORKERS * cores)):
        if getattr(args, flag) != "auto" and int(getattr(args, flag)) > most:
            raise UsageError(f"--{flag} {getattr(args, flag)}: wanted at most {most} on this machine of {cores} cores")
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


def added_trials(args: argparse.Namespace) -> int | None:
    """How many trials this command may start, None: any number."""
    if args.n_trials is None and args.total_trials is None and args.timeout is None and args.sampler != "grid":
        return DEFAULT_TRIALS
    return int(args.n_trials) if args.n_trials is not None else None


def goal_of(args: argparse.Namespace) -> int | None:
    """How many trials this command starts at most, before the study has been looked at."""
    counts = [count for count in (added_trials(args), args.total_trials) if count is not None]
    return min(counts) if counts else None


def wishes_of(args: argparse.Namespace) -> Wishes:
    """What the command line says of the plan."""
    from tuner.prepare import Wishes
    from tuner.samplers import LEARNING

    workers, threads, lanes = (
        None if text == "auto" else int(text) for text in (args.workers, args.threads, args.lanes)
    )
    return Wishes(
        device=args.device,
        workers=workers,
        threads=threads,
        lanes=lanes,
        precision=args.precision,
        goal=goal_of(args),
        timeout=args.timeout,
        # Halving compares the trials of a round with each other: the wider, the better is the best quarter.
        learning=args.sampler in LEARNING and args.pruner != "halving",
        repeatable=args.seed is not None,
    )
