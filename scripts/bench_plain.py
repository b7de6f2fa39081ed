"""Time the tuner against the plain Optuna script on the default study, each as a whole process on a fresh storage.

    python scripts/bench_plain.py --n-trials 50
    python scripts/bench_plain.py --n-trials 1000 --plain-trials 200 --repeats 3
    python scripts/bench_plain.py --n-trials 50 --against sklearn --sampler random

The two take turns, and who goes first changes, so that a machine that slows down slows both. With `--plain-trials` the
other one does fewer trials, and its time for all of them is extrapolated from that and from the time for one trial.
Arguments after `--` go to `python -m tuner.run`.
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


@dataclass(frozen=True)
class Timing:
    """One whole process: its seconds, process start included, and the best value that its study holds."""

    seconds: float
    best: float


def command(side: str, args: argparse.Namespace, repeat: int, n_trials: int) -> list[str]:
    """What to run; the storage is added by `measure`."""
    if side == "sklearn":
        words = [sys.executable, str(ROOT / "scripts" / "sklearn_search.py"), "--n-trials", str(n_trials)]
        return [*words, "--seed", str(args.seed + repeat)]
    shared = ["--n-trials", str(n_trials), "--threads", str(args.threads), "--pruner", "none"]
    shared += ["--sampler", args.sampler]
    if side == "plain":
        return [sys.executable, str(ROOT / "scripts" / "plain_optuna.py"), *shared, "--seed", str(args.seed + repeat)]
    # Without a seed: with one the plan would keep to one worker, so that the same is sampled again.
    return [sys.executable, "-m", "tuner.run", "--device", "cpu", *shared, *args.tuner_args]


def measure(side: str, args: argparse.Namespace, repeat: int) -> Timing:
    """A side's seconds for all trials; extrapolated where it is not to do them all."""
    if side == "tuner" or args.plain_trials is None:
        return measure_process(side, command(side, args, repeat, args.n_trials), args.n_trials)
    one = measure_process(side, command(side, args, repeat, 1), 1)
    some = measure_process(side, command(side, args, repeat, args.plain_trials), args.plain_trials)
    each = (some.seconds - one.seconds) / (args.plain_trials - 1)
    return Timing(one.seconds + each * (args.n_trials - 1), some.best)


def measure_process(side: str, words: list[str], n_trials: int) -> Timing:
    """Run a command on a storage of its own and read that afterwards, with the clock stopped."""
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/bench.db"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        started = time.perf_counter()
        storage = [] if side == "sklearn" else ["--storage", url]
        done = subprocess.run([*words, *storage], cwd=place, env=environ, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            sys.exit(f"wanted {' '.join(words)} to succeed, got exit code {done.returncode}:\n{done.stderr}")
        if side == "sklearn":
            return Timing(seconds, json.loads(done.stdout)["best"])
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
    parser.add_argument("--against", choices=["plain", "sklearn"], default="plain")
    parser.add_argument("--plain-trials", type=int, help="trials of the other side, to extrapolate from (2 or more)")
    parser.add_argument("--json", action="store_true", help="print one document instead of a table")
    args = parser.parse_args(argv[:cut])
    if args.plain_trials is not None and not 2 <= args.plain_trials <= args.n_trials:
        parser.error("--plain-trials must be from 2 to --n-trials")
    if min(args.n_trials, args.threads, args.repeats) < 1:
        parser.error("--n-trials, --threads and --repeats must be 1 or more")
    args.tuner_args = argv[cut + 1 :]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sides = ("tuner", args.against)
    timings: dict[str, list[Timing]] = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side in sides if repeat % 2 == 0 else sides[::-1]:
            timing = measure(side, args, repeat)
            timings[side].append(timing)
            print(f"repeat {repeat} {side}: {timing.seconds:.2f} s, best {timing.best:.6f}", file=sys.stderr)

    ratios = [b.seconds / a.seconds for a, b in zip(timings["tuner"], timings[args.against], strict=True)]
    if args.json:
        document = {
            "n_trials": args.n_trials,
            "threads": args.threads,
            "sampler": args.sampler,
            "tuner_args": args.tuner_args,
            **{side: [asdict(timing) for timing in timings[side]] for side in sides},
            "median_seconds": {side: statistics.median(t.seconds for t in timings[side]) for side in sides},
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{args.n_trials} trials, {args.threads} thread(s), {args.sampler}, {args.repeats} repeat(s): median (range)")
    for side in sides:
        seconds = spread([timing.seconds for timing in timings[side]], 2)
        print(f"{side}: {seconds} s, best loss {spread([timing.best for timing in timings[side]], 4)}")
    print(f"{args.against} / tuner: {spread(ratios, 2)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
