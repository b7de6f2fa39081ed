"""What do 64 trials by successive halving cost, in full trainings of one trial? Interleaved, one thread.

    python scripts/bench_halving.py --repeats 5

The whole search is timed, in this process: random samples of the default study, 64 lanes, factor 4, 20 epochs, every
epoch and every end written to a SQLite file of its own; not the imports, the data and the opening of the study. The
lone training is one trial of 20 epochs with batch size 32 by the plain trainer, without a study around it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import torch

from tuner.assignment import Assignment, CountedBudget, make_search
from tuner.clock import Stopwatch
from tuner.data import Data, prepare
from tuner.device import choose, keep_host_memory
from tuner.interrupt import Interrupt
from tuner.results import Finished
from tuner.spec import LoadedSpec, Space, explore
from tuner.storage import open_storage
from tuner.study import open_study, target_of
from tuner.study_file import load_spec
from tuner.train import Lone


def halving(loaded: LoadedSpec, space: Space, data: Data, device: torch.device, n: int, seed: int) -> tuple[float, int]:
    """Seconds of one search of `n` trials on a new file, and the epochs that its trials were trained, added up."""
    target = target_of(loaded.spec, None)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'tuner.db'}"
        storage = open_storage(url)
        opened = open_study(storage, loaded, space, data.digest, target, None)
        assignment = Assignment(
            source=loaded.source,
            url=url,
            study_name=opened.study.study_name,
            target=target,
            device=str(device),
            threads=1,
            precision="float32",
            lanes=n,
            sampler="random",
            pruner="halving",
            threshold=None,
            seed=seed,
            run=0,
            total_limit=None,
            weights=None,
        )
        start = time.perf_counter()
        search = make_search(
            assignment, loaded, data, device, CountedBudget(n, None), Stopwatch(), Interrupt(), storage=storage
        )
        ended = [event for event in search.events() if isinstance(event, Finished)]
        seconds = time.perf_counter() - start
        storage.close()
    return seconds, sum(event.epochs for event in ended)


def lone(loaded: LoadedSpec, space: Space, data: Data, device: torch.device) -> float:
    """Seconds of one trial's full training, with batch size 32."""
    job = loaded.spec.job(0, space.samples[0])
    job = replace(job, sgd=replace(job.sgd, batch_size=32, lr=min(job.sgd.lr, 0.1)))
    start = time.perf_counter()
    trainer, watch = Lone(job, loaded.spec.task(data, device)), Stopwatch()
    for _ in range(loaded.spec.epochs):
        trainer.epoch(watch)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-trials", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_host_memory()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    device = choose(args.device).device
    loaded = load_spec("digits_mlp")
    space = explore(loaded)
    data = prepare(loaded.spec.data(), device, loaded.origin)
    halving(loaded, space, data, device, args.n_trials, 0)
    lone(loaded, space, data, device)
    searches, trainings, epochs = [], [], set()
    for seed in range(args.repeats):
        seconds, trained = halving(loaded, space, data, device, args.n_trials, seed)
        searches.append(seconds)
        epochs.add(trained)
        trainings.append(lone(loaded, space, data, device))
    ratios = [search / training for search, training in zip(searches, trainings, strict=True)]
    print(f"{args.n_trials} trials by halving, {device}, one thread, {args.repeats} repeats: median (range)")
    print(f"trained epochs, all trials together: {', '.join(map(str, sorted(epochs)))}")
    print(f"search, seconds         {spread(searches)}")
    print(f"lone training, seconds  {spread(trainings)}")
    print(f"ratio                   {spread(ratios)}")


if __name__ == "__main__":
    main()
