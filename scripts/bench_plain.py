"""Time the tuner against the plain Optuna script on the default study, each as a whole process on a fresh storage.

The two take turns, and who goes first changes, so that a machine that slows down slows both. Arguments after `--` go to
`python -m tuner.run`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("tuner", "plain")


@dataclass(frozen=True)
class Timing:
    """One whole process: its seconds, process start included, and the best value that its study holds."""

    seconds: float
    best: float


def command(side: str, args: argparse.Namespace, repeat: int) -> list[str]:
    """What to run; the storage is added by `measure`."""
    shared = ["--n-trials", str(args.n_trials), "--threads", str(args.threads), "--pruner", "none"]
    shared += ["--sampler", args.sampler, "--seed", str(args.seed + repeat)]
    if side == "plain":
        return [sys.executable, str(ROOT / "scripts" / "plain_optuna.py"), *shared]
    return [sys.executable, "-m", "tuner.run", "--device", "cpu", *shared, *args.tuner_args]


def measure(words: list[str], n_trials: int) -> Timing:
    """Run a command on a storage of its own and read that afterwards, with the clock stopped."""
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/bench.db"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        started = time.perf_counter()
        done = subprocess.run([*words, "--storage", url], cwd=place, env=environ, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            sys.exit(f"wanted {' '.join(words)} to succeed, got exit code {done.returncode}:\n{done.stderr}")
        (name,) = optuna.get_all_study_names(url)
        study = optuna.load_study(study_name=name, storage=url)
        ended = sum(trial.state.is_finished() for trial in study.trials)
        if ended != n_trials:
            sys.exit(f"wanted {n_trials} trials of {' '.join(words)}, found {ended}")
        return Timing(seconds, study.best_value)


def spread(numbers: list[float], digits: int) -> str:
    """Median and range, for people."""
    low, high = min(numbers), max(numbers)
    return f"{statistics.median(numbers):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def parse(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-trials", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; the next ones count up")
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe")
    parser.add_argument("--json", action="store_true", help="print one document instead of a table")
    args = parser.parse_args(argv[:cut])
    if min(args.n_trials, args.threads, args.repeats) < 1:
        parser.error("--n-trials, --threads and --repeats must be 1 or more")
    args.tuner_args = argv[cut + 1 :]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    timings: dict[str, list[Timing]] = {side: [] for side in SIDES}
    for repeat in range(args.repeats):
        for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
            timing = measure(command(side, args, repeat), args.n_trials)
            timings[side].append(timing)
            print(f"repeat {repeat} {side}: {timing.seconds:.2f} s, best {timing.best:.6f}", file=sys.stderr)

    ratios = [plain.seconds / tuner.seconds for tuner, plain in zip(timings["tuner"], timings["plain"], strict=True)]
    if args.json:
        document = {
            "n_trials": args.n_trials,
            "threads": args.threads,
            "sampler": args.sampler,
            "tuner_args": args.tuner_args,
            **{side: [asdict(timing) for timing in timings[side]] for side in SIDES},
            "median_seconds": {side: statistics.median(t.seconds for t in timings[side]) for side in SIDES},
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{args.n_trials} trials, {args.threads} thread(s), {args.sampler}, {args.repeats} repeat(s): median (range)")
    for side in SIDES:
        seconds = spread([timing.seconds for timing in timings[side]], 2)
        print(f"{side}: {seconds} s, best loss {spread([timing.best for timing in timings[side]], 4)}")
    print(f"plain / tuner: {spread(ratios, 2)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
