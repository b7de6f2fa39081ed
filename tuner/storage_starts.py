"""Trials are started within the budget and with their owner, in the transaction that makes them; also many in one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import BudgetSpentError
from tuner.storage_rows import WORKER, attribute_rows, counts, put, put_parameters
from tuner.storage_transactions import Transactional, writes, writes_own

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Starting(Transactional):
    """How trials start.

    `owner`: if not empty, the user attribute ``worker`` of each trial that is started here (created or claimed).
    `total_limit`: if not None, no trial is started here once its study holds as many complete, pruned and running
    ones: BudgetSpentError, and nothing is written. Both are part of the transaction that starts the trial.
    `queued_only`: no trial is started here that was not queued before: BudgetSpentError.
    `started`: trials that were started together and not yet asked for.
    """

    owner = ""
    total_limit: int | None = None
    queued_only = False
    started: list[FrozenTrial]

    @writes_own
    def start_together(self, study_id: int, count: int) -> None:
        """Start up to `count` trials in one transaction, as many as the budget allows; asking takes from them first.

        None where trials are queued, which are to be started instead.
        """
        from optuna.storages._rdb import models

        if self.queued_only or count < 2:
            return
        with _create_scoped_session(self.scoped_session) as session:
            models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            put_parameters(session, self.gathered)
            if session.query(models.TrialModel).filter_by(study_id=study_id, state=TrialState.WAITING).first():
                count = 0
            elif self.total_limit is not None:
                count = min(count, self.total_limit - sum(counts(session, study_id).values()))
            new = [self._new(session, study_id, None) for _ in range(count)]
        self.gathered.clear()
        self.started += new

    @writes_own  # Optuna's cache adds the trial itself.
    def _create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> FrozenTrial:
        # As Optuna's, without its own retries: up to five more waits for a lock.
        from optuna.storages._rdb import models

        if self.queued_only and template_trial is None:
            raise BudgetSpentError("wanted a queued trial, found none")
        if self.started and template_trial is None:
            return self.started.pop(0)
        with _create_scoped_session(self.scoped_session) as session:
            models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            put_parameters(session, self.gathered)
            frozen = self._new(session, study_id, template_trial)
        self.gathered.clear()
        return frozen

    @writes
    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        if state != TrialState.RUNNING:
            return super().set_trial_state_values(trial_id, state, values)
        from optuna.storages._rdb import models

        with _create_scoped_session(self.scoped_session) as session:
            study_id = session.query(models.TrialModel.study_id).filter_by(trial_id=trial_id).scalar()
            if self.total_limit is not None and study_id is not None:
                models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            trial: Any = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
            self.check_trial_is_updatable(trial_id, trial.state)
            if trial.state != TrialState.WAITING:
                return False
            self._start(session, trial.study_id, trial_id)
            trial.state = TrialState.RUNNING
            trial.datetime_start = datetime.now()
        return True

    def _new(self, session: Session, study_id: int, template_trial: FrozenTrial | None) -> FrozenTrial:
        frozen = copy.deepcopy(template_trial) if template_trial else optuna.create_trial(state=TrialState.RUNNING)
        trial: Any = self._get_prepared_new_trial(study_id, template_trial, session)
        if trial.state == TrialState.RUNNING:
            frozen.user_attrs.update(self._start(session, study_id, trial.trial_id))
        frozen.number, frozen._trial_id = trial.number, trial.trial_id
        frozen.datetime_start = trial.datetime_start
        return frozen

    def _start(self, session: Session, study_id: int, trial_id: int) -> dict[str, Any]:
        """What belongs to the start of a trial, once its study is locked: the budget, then its attributes."""
        from optuna.storages._rdb import models

        if self.total_limit is not None:
            held = sum(counts(session, study_id, besides=trial_id).values())
            if held >= self.total_limit:
                raise BudgetSpentError(
                    f"wanted to start a trial, found {held} complete, pruned or running of {self.total_limit}"
                )
        attributes = {WORKER: self.owner} if self.owner else {}
        put(session, models.TrialUserAttributeModel, attribute_rows(trial_id, attributes))
        return attributes
