"""The plain Optuna script that a user would write for the default study: what the tuner is measured against.

The same network, data, search space, epochs and value as studies/digits_mlp.py, by Optuna's and PyTorch's own examples:
one process, a data loader, stock storage. It imports nothing of tuner.
"""

from __future__ import annotations

import argparse
import math
import time

import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20
PRUNERS = {"none": optuna.pruners.NopPruner, "median": optuna.pruners.MedianPruner}
SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and validation splits: 60 and 20 % of each class; the other 20 % are set apart for a test."""
    x, y = load_digits(return_X_y=True)
    x_train, x_rest, y_train, y_rest = train_test_split(x / 16, y, train_size=0.6, stratify=y, random_state=0)
    x_val, _, y_val, _ = train_test_split(x_rest, y_rest, train_size=0.5, stratify=y_rest, random_state=0)
    return (
        TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train)),
        TensorDataset(torch.tensor(x_val, dtype=torch.float32), torch.tensor(y_val)),
    )


def network() -> nn.Module:
    """A multilayer perceptron, 64-64-64-10."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_epoch(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], optimizer: torch.optim.SGD) -> None:
    """One pass over the training split."""
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validation_loss(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """The mean loss over the examples of the validation split."""
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.cross_entropy(model(x), y, reduction="sum").item()
        count += len(y)
    return total / count


def run_trial(trial: optuna.Trial, train: TensorDataset, validation: TensorDataset, seed: int) -> float:
    """Train one network; its value is the best validation loss over its epochs."""
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    batch_size = trial.suggest_categorical("batch_size", [32, 64, 128, 256])
    momentum = trial.suggest_float("momentum", 0.0, 0.99)
    weight_decay = trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True)

    torch.manual_seed(seed + trial.number)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    validation_loader = DataLoader(validation, batch_size=256)

    best = math.inf
    for epoch in range(EPOCHS):
        train_epoch(model, train_loader, optimizer)
        loss = validation_loss(model, validation_loader)
        if not math.isfinite(loss):
            raise optuna.TrialPruned(f"loss is {loss} at epoch {epoch}")
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
        best = min(best, loss)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-trials", type=int, default=50)
    parser.add_argument("--storage", default="sqlite:///plain.db", help="URL (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=SAMPLERS, default="tpe")
    parser.add_argument("--pruner", choices=PRUNERS, default="none")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    train, validation = digits()
    study = optuna.create_study(
        storage=args.storage,
        study_name="digits-mlp-plain",
        sampler=SAMPLERS[args.sampler](seed=args.seed),
        pruner=PRUNERS[args.pruner](),
        load_if_exists=True,
    )
    started = time.perf_counter()
    study.optimize(lambda trial: run_trial(trial, train, validation, args.seed), n_trials=args.n_trials)
    seconds = time.perf_counter() - started
    print(f"best validation loss {study.best_value:.6f} (trial {study.best_trial.number}), {seconds:.1f} seconds")


if __name__ == "__main__":
    main()
