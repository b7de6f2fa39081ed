"""A spec's training as an ordinary Optuna objective, for ``optuna.Study.optimize`` in a script of one's own.

study.optimize(Objective(spec, device="cpu"), n_trials=5)
"""

from __future__ import annotations

from collections.abc import Sequence

import optuna

from tuner.clock import Stopwatch
from tuner.data import prepare
from tuner.device import choose, describe, peak_megabytes, reset_peak, synchronize
from tuner.results import REASON, Record
from tuner.spec import StudySpec
from tuner.study import target_of
from tuner.train import Lone


class Objective:
    """Trains one trial and returns its value: the same training, value and attributes as in ``python -m tuner.run``.

    Args:
        spec: What is tuned. Its data are loaded, and moved to the device, here.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps`` or ``xpu``.
        objectives: Names as for ``--objectives``, or None for the spec's own; the study's directions must match them.

    Raises `tuner.errors.TunerError` for a device that is not there or a mistake in the spec. A diverged trial is
    pruned, and says why in its attribute ``reason``.
    """

    def __init__(self, spec: StudySpec, device: str = "auto", objectives: Sequence[str] | None = None) -> None:
        self.spec = spec
        self.device = choose(device).device
        self._target = target_of(spec, objectives)
        self._task = spec.task(prepare(spec.data(), self.device, spec.name), self.device)

    def __call__(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        watch = Stopwatch()
        record = Record(trial.number, self._target, watch.now())
        hyperparameters = self.spec.space(trial)
        watch.lap("wait")
        reset_peak(self.device)
        lone = Lone(self.spec.job(trial.number, hyperparameters), self._task)
        synchronize(self.device)
        record.build_seconds = watch.lap("build")
        reason = ""
        while not reason and record.epochs < self._task.epochs:
            (result,) = lone.epoch(watch)
            record.add(result, lanes=1)
            reason = record.trouble
            if not reason and self._target.has_curve:
                trial.report(result.validation[record.measure], step=result.epoch)
                if record.epochs < self._task.epochs and trial.should_prune():
                    reason = f"pruned at epoch {result.epoch}"
        attributes = record.attributes(watch.now(), peak_megabytes(self.device))
        attributes |= {"device": describe(self.device), "lanes": 1, "seed": self.spec.seed}
        attributes |= {REASON: reason} if reason else {}
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        if reason:
            raise optuna.TrialPruned(reason)
        values = record.values(attributes)
        return values if len(values) > 1 else values[0]
