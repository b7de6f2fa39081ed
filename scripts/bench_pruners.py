"""Which pruner reaches the lower loss in less time? Runs of each, interleaved, on the studies that come along.

python scripts/bench_pruners.py --n-trials 50 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ("digits_mlp", "diabetes_mlp", "digits_cnn")
PRUNERS = ("none", "median", "halving", "hyperband", "patient")


def run(study: str, pruner: str, n_trials: int, seed: int) -> tuple[float, float]:
    """(best validation loss, seconds of the whole process) of one run on a new storage."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tuner.run", "--study", study, "--n-trials", str(n_trials), "--json"]
        command += ["--seed", str(seed), "--threads", "1", "--device", "cpu", "--pruner", pruner]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout)
        return result["best"]["values"][0], result["seconds"]


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-trials", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--studies", nargs="+", default=STUDIES)
    parser.add_argument("--pruners", nargs="+", default=PRUNERS)
    args = parser.parse_args()
    for study in args.studies:
        found: dict[str, list[tuple[float, float]]] = {pruner: [] for pruner in args.pruners}
        for seed in range(args.repeats):
            for pruner in args.pruners:
                found[pruner].append(run(study, pruner, args.n_trials, seed))
        for pruner, rows in found.items():
            losses, seconds = ([row[i] for row in rows] for i in (0, 1))
            print(
                f"{study:13} {pruner:10} best loss {statistics.median(losses):.4f}"
                f" ({min(losses):.4f} to {max(losses):.4f})  {statistics.median(seconds):6.1f} s"
                f" ({min(seconds):.1f} to {max(seconds):.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
