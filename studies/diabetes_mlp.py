"""Tune a multilayer perceptron for regression on scikit-learn's diabetes data.

442 patients, ten measurements each; the target is the progression of the disease after a year, in units of its standard
deviation. With 50 trials the best validation loss (mean squared error) is about 0.5: half of the variance is explained.
"""

from typing import Any

import optuna
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from tuner import Splits, StudySpec


def diabetes() -> Splits:
    """Measurements and target standardized by the training split, split 60/20/20."""
    measurements, progression = load_diabetes(return_X_y=True, scaled=False)
    x = torch.tensor(measurements, dtype=torch.float32)
    y = torch.tensor(progression, dtype=torch.float32)[:, None]
    rest, test = train_test_split(range(len(y)), test_size=0.2, random_state=0)
    train, validation = train_test_split(rest, test_size=0.25, random_state=0)
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0)
    y = (y - y[train].mean()) / y[train].std()
    return Splits((x[train], y[train]), (x[validation], y[validation]), (x[test], y[test]))


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [16, 32, 64]),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1.0, log=True),
        "width": trial.suggest_categorical("width", [8, 16, 32, 64]),
    }


def model(hyperparameters: dict[str, Any]) -> nn.Module:
    width = hyperparameters["width"]
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def mean_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


spec = StudySpec(
    name="diabetes-mlp",
    data=diabetes,
    space=space,
    model=model,
    loss=nn.functional.mse_loss,
    metrics={"mean_absolute_error": mean_absolute_error},
    epochs=40,
)
