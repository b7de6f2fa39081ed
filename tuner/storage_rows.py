"""The rows of Optuna's tables that belong to a trial: made from values, written in one statement each, and counted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.storages._rdb import models
    from sqlalchemy.orm import Session

WORKER = "worker"
"""The user attribute that names a trial's owner."""

_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


@dataclass(frozen=True)
class Write:
    """All that is new of one running trial.

    `attributes` are user attributes (JSON), `reports` intermediate values by step. With a finished `state` the trial
    ends, with `values` (one per objective).
    """

    trial_id: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[int, float] = field(default_factory=dict)
    state: TrialState | None = None
    values: Sequence[float] = ()


@dataclass(frozen=True)
class Parameter:
    """A sampled value, in Optuna's internal representation."""

    trial_id: int
    name: str
    value: float
    distribution: BaseDistribution


def attribute_rows(trial_id: int, attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of user or system attributes; the values become JSON."""
    return [{"trial_id": trial_id, "key": key, "value_json": json.dumps(value)} for key, value in attributes.items()]


def report_rows(trial_id: int, reports: Mapping[int, float]) -> list[dict[str, Any]]:
    """Rows of intermediate values, by step; inf and nan as Optuna writes them."""
    from optuna.storages._rdb import models

    stored = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr
    columns = ("trial_id", "step", "intermediate_value", "intermediate_value_type")
    rows = [(trial_id, step, *stored(float(value))) for step, value in reports.items()]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def value_rows(trial_id: int, values: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a trial's values, one per objective; inf as Optuna writes it."""
    from optuna.storages._rdb import models

    stored = models.TrialValueModel.value_to_stored_repr
    columns = ("trial_id", "objective", "value", "value_type")
    rows = [(trial_id, number, *stored(float(value))) for number, value in enumerate(values)]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def put(session: Session, model: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` (trial_id, a second key, the rest) in one statement; those that are there are overwritten."""
    if not rows:
        return
    from sqlalchemy.dialects import postgresql, sqlite

    insert: Any = (sqlite if session.get_bind().dialect.name == "sqlite" else postgresql).insert(model)
    trial_id, key, *others = rows[0]
    session.execute(
        insert.on_conflict_do_update(
            index_elements=[trial_id, key], set_={name: insert.excluded[name] for name in others}
        ),
        list(rows),
    )


def write_all(session: Session, new: Sequence[Write]) -> set[int]:
    """Write what is new of several trials, a statement for each table; the trials that had ended before are left."""
    from optuna.storages._rdb import models

    if not new:
        return set()
    ids = [write.trial_id for write in new]
    query = session.query(models.TrialModel).filter(models.TrialModel.trial_id.in_(ids))
    rows: list[Any] = query.order_by(models.TrialModel.trial_id).with_for_update().all()
    trials = {row.trial_id: row for row in rows}
    for trial_id in ids:
        if trial_id not in trials:
            raise KeyError(f"no trial has the trial_id {trial_id}")
    lost = {trial_id for trial_id, trial in trials.items() if trial.state.is_finished()}
    kept = [write for write in new if write.trial_id not in lost]
    attributes = [row for write in kept for row in attribute_rows(write.trial_id, write.attributes)]
    reports = [row for write in kept for row in report_rows(write.trial_id, write.reports)]
    values = [row for write in kept for row in value_rows(write.trial_id, write.values)]
    put(session, models.TrialUserAttributeModel, attributes)
    put(session, models.TrialIntermediateValueModel, reports)
    put(session, models.TrialValueModel, values)
    for write in kept:
        if write.state is not None:
            end(trials[write.trial_id], write.state)
    return lost


def put_parameters(session: Session, parameters: Sequence[Parameter]) -> None:
    """Insert parameters that are new, in one statement."""
    from optuna.storages._rdb import models
    from sqlalchemy import insert

    if parameters:
        session.execute(
            insert(models.TrialParamModel),
            [
                {
                    "trial_id": parameter.trial_id,
                    "param_name": parameter.name,
                    "param_value": parameter.value,
                    "distribution_json": distribution_to_json(parameter.distribution),
                }
                for parameter in parameters
            ],
        )


def owned(session: Session, study_id: int, owner: str) -> Any:
    """The query for the trials of the worker `owner`."""
    from optuna.storages._rdb import models

    trials, attribute = models.TrialModel, models.TrialUserAttributeModel
    return (
        session.query(trials)
        .join(attribute, attribute.trial_id == trials.trial_id)
        .filter(trials.study_id == study_id)
        .filter(attribute.key == WORKER, attribute.value_json == json.dumps(owner))
    )


def running_of(session: Session, study_id: int, owner: str) -> list[Any]:
    """The rows of the running trials of the worker `owner`, locked."""
    from optuna.storages._rdb import models

    trials = models.TrialModel
    running = owned(session, study_id, owner).filter(trials.state == TrialState.RUNNING)
    return list(running.order_by(trials.trial_id).with_for_update(of=trials))


def end(trial: models.TrialModel, state: TrialState) -> None:
    """Give `trial`, a row that is locked, its new state, and the time of its end if it is one."""
    trial.state = state
    if state.is_finished():
        trial.datetime_complete = datetime.now()


def counts(session: Session, study_id: int, besides: int | None = None) -> dict[TrialState, int]:
    """How many trials of the study count towards the budget, by state, without the trial `besides`."""
    from optuna.storages._rdb import models
    from sqlalchemy import func

    trials = models.TrialModel
    query = session.query(trials.state, func.count(trials.trial_id)).filter(
        trials.study_id == study_id, trials.state.in_(_COUNTED)
    )
    if besides is not None:
        query = query.filter(trials.trial_id != besides)
    found = query.group_by(trials.state).all()
    return {state: sum(count for other, count in found if other == state) for state in _COUNTED}
