"""Successive halving: of the trials that reach a rung, the best quarter goes on, and in the end to the full length.

Trials that one worker started in the same round are a cohort. Those that are ahead wait at a rung for the others, so
that all of them are compared at once, by the rule of Jamieson and Talwalkar (2016, "Non-stochastic best arm
identification and hyperparameter optimization", algorithm 1), and none goes on because it came early. Fewer than four
have no quarter: each of them is compared with all trials of the study that were at this rung, the asynchronous rule
(Li et al. 2020, "A system for massively parallel hyperparameter tuning"), so that a search of one lane prunes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

FACTOR = 4
"""Of n trials at a rung, n // FACTOR go on, at least one."""


def rungs_of(epochs: int) -> tuple[int, ...]:
    """After how many epochs trials are compared: a sixteenth and a quarter of all, so that the last segment is full.

    More rungs would compare trials of a long training after its first few steps.
    """
    return tuple(rung for rung in (epochs // FACTOR**2, max(1, epochs // FACTOR)) if 0 < rung < epochs)


def ranked(values: Mapping[int, float], maximize: bool) -> list[int]:
    """The trials (number: value), best first: NaN last, and of equal ones the older trial first."""

    def place(number: int) -> tuple[bool, float, int]:
        value = values[number]
        if math.isnan(value):
            return True, 0.0, number
        return False, -value if maximize else value, number

    return sorted(values, key=place)


@dataclass(eq=False)
class Cohort:
    """Trials of one age. `diverged` of them have ended since the last rung: at the next one they count as the worst."""

    rungs: tuple[int, ...] = ()
    diverged: int = 0
    passed: int = 0

    @property
    def rung(self) -> int | None:
        """The number of epochs after which these trials are compared next."""
        return self.rungs[self.passed] if self.passed < len(self.rungs) else None

    def losers(self, values: Mapping[int, float], maximize: bool) -> dict[int, str] | None:
        """Which of the trials that are at the rung (number: value) end there, and why; they are past it then.

        None where there are too few to say so: the study has to be asked about each of them.
        """
        count = len(values) + self.diverged
        self.passed, self.diverged = self.passed + 1, 0
        if count < FACTOR:
            return None
        kept = count // FACTOR
        order = ranked(values, maximize)
        return {order[i]: f"place {i + 1} of {count}, {kept} go on" for i in range(kept, len(order))}


class Halving(optuna.pruners.BasePruner):
    """The asynchronous rule for one trial, as Optuna asks a pruner; cohorts are compared by `Cohort.losers`."""

    def __init__(self, epochs: int) -> None:
        self.rungs = rungs_of(epochs)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        step = trial.last_step
        if step is None or step + 1 not in self.rungs:
            return False
        others = study.get_trials(deepcopy=False)
        values = {t.number: t.intermediate_values[step] for t in others if step in t.intermediate_values}
        values[trial.number] = trial.intermediate_values[step]
        best = ranked(values, study.direction == StudyDirection.MAXIMIZE)[: max(1, len(values) // FACTOR)]
        return trial.number not in best
