"""Tune the hyperparameters of PyTorch models with Optuna, and fill the device while doing so.

The two names that a study file needs, and the objective for a script of one's own, are here; they are looked up when
they are first used, so that ``import tuner`` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.data import Splits as Splits
    from tuner.objective import Objective as Objective
    from tuner.spec import StudySpec as StudySpec

__version__ = "0.1.0"
__all__ = ["Objective", "Splits", "StudySpec"]

_HOMES = {"Objective": "tuner.objective", "Splits": "tuner.data", "StudySpec": "tuner.spec"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
