"""The rows of Optuna's tables that belong to a trial: made from values, written in one statement each, and counted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.storages._rdb import models
    from sqlalchemy.orm import Session

WORKER = "worker"
"""The user attribute that names a trial's owner."""

_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def attribute_rows(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of user or system attributes; the values become JSON."""
    return [{"key": key, "value_json": json.dumps(value)} for key, value in attributes.items()]


def report_rows(reports: Mapping[int, float]) -> list[dict[str, Any]]:
    """Rows of intermediate values, by step; inf and nan as Optuna writes them."""
    from optuna.storages._rdb import models

    stored = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr
    columns = ("step", "intermediate_value", "intermediate_value_type")
    return [dict(zip(columns, (step, *stored(float(value))), strict=True)) for step, value in reports.items()]


def value_rows(values: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a trial's values, one per objective; inf as Optuna writes it."""
    from optuna.storages._rdb import models

    stored = models.TrialValueModel.value_to_stored_repr
    columns = ("objective", "value", "value_type")
    return [dict(zip(columns, (number, *stored(float(value))), strict=True)) for number, value in enumerate(values)]


def put(session: Session, model: Any, trial_id: int, rows: list[dict[str, Any]]) -> None:
    """Write `rows` of a trial in one statement; a row whose first column is there for this trial is overwritten."""
    if not rows:
        return
    from sqlalchemy.dialects import postgresql, sqlite

    insert: Any = (sqlite if session.get_bind().dialect.name == "sqlite" else postgresql).insert(model)
    key, *others = rows[0]
    session.execute(
        insert.on_conflict_do_update(
            index_elements=["trial_id", key], set_={name: insert.excluded[name] for name in others}
        ),
        [{"trial_id": trial_id, **row} for row in rows],
    )


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
