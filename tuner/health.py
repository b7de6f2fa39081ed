"""Whether a storage is healthy: what is in it, and what is wrong with it. Nothing here changes anything."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState

from tuner.owner import is_gone, is_here
from tuner.sqlite_file import FileState, Finding, inspect_file, look
from tuner.storage import masked, sqlite_path
from tuner.storage_rows import WORKER
from tuner.storage_schema import schema_versions
from tuner.storage_url import OPTUNA_TABLE, STUDY_TABLES, cannot_open
from tuner.weights import WeightsFolder, default_folder, numbers_in

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

HEARTBEAT_SECONDS = 600.0
"""How old the last heartbeat of a living process may be, in seconds."""

_WORDS = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


@dataclass
class StudyState:
    """A study's trials by state, and the numbers of the running ones by what is known of their process.

    `zombies`: it was a process of this host, and is gone (by owner). `silent`: its last heartbeat is old. `elsewhere`:
    of another host, without heartbeats. `unowned`: nobody wrote whose it is, as in plain Optuna.
    """

    id: int
    name: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_WORDS.values(), 0))
    zombies: dict[str, list[int]] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    unowned: list[int] = field(default_factory=list)


@dataclass
class Health:
    """A storage at one moment. `orphans` are rows whose trial or study is not there, by table."""

    url: str
    file: FileState | None = None
    server: str = ""
    schema: str = ""
    studies: list[StudyState] = field(default_factory=list)
    orphans: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> list[Finding]:
        """What makes it unhealthy."""
        return [finding for finding in self.findings if finding.wrong]


def inspect(url: str, *, full: bool = False) -> Health:
    """Look at the storage at the canonical `url`; `full` as in `inspect_file`. Makes and changes nothing."""
    from sqlalchemy.exc import SQLAlchemyError

    health = Health(url)
    path = sqlite_path(url)
    if path is not None:
        health.file, health.findings = inspect_file(path, full=full)
        if health.file is None or not health.file.sound:
            return health
    # Before the rows: weights are written before the trial's end is told. The folder of a server's studies is that of
    # wherever a run was started, so what else is in it says nothing.
    folder = default_folder(url)
    looks = path is not None and folder.is_dir()
    kept = {place.name: numbers_in(place) for place in folder.iterdir()} if looks else {}
    try:
        with _snapshot(url, path) as session:
            connection = session.connection()
            if path is None:
                health.server = str(connection.exec_driver_sql("SHOW server_version").scalar())
            health.schema, found = _schema(url, connection)
            health.findings += found
            if health.schema and not any(finding.wrong for finding in found):
                try:
                    _inspect_rows(health, session)
                    health.findings += _weights(url, session, health.studies, kept)
                except (LookupError, ValueError) as error:  # a state or an attribute as no Optuna writes it
                    health.findings.append(Finding("rows", f"a row cannot be read: {' '.join(str(error).split())}"))
    except (SQLAlchemyError, ImportError, ValueError) as error:
        health.findings.append(Finding("connection", str(cannot_open(url, error))))
    return health


@contextmanager
def _snapshot(url: str, path: Path | None) -> Iterator[Session]:
    """A session in one transaction that only reads: all it sees is of one moment."""
    from sqlalchemy import NullPool, create_engine, orm

    if path is not None:
        engine = create_engine("sqlite://", creator=lambda: look(path), poolclass=NullPool)
    else:
        engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 10})
        engine = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    with orm.Session(engine) as session:
        if path is not None:
            session.connection().exec_driver_sql("BEGIN")
        yield session


def _schema(url: str, connection: Connection) -> tuple[str, list[Finding]]:
    """The version of the tables, empty where there are none yet, and what is wrong with it."""
    from optuna.storages._rdb import models
    from sqlalchemy import inspect as inspect_tables

    tables = set(inspect_tables(connection).get_table_names())
    if not tables & STUDY_TABLES and (sqlite_path(url) is None or not tables):
        return "", [Finding("empty", "it holds no tables yet", "a run makes them", wrong=False)]
    if not tables >= STUDY_TABLES:
        if all(OPTUNA_TABLE.match(name) for name in tables):
            text = "its creation was interrupted: tables are missing"
            return "", [Finding("unfinished", text, "the next run completes it", wrong=False)]
        text = f"it is a database of another program (tables {', '.join(sorted(tables)[:3])})"
        return "", [Finding("foreign", text, "name another storage")]
    before = connection.exec_driver_sql("SELECT schema_version FROM version_info").scalar()
    stamp = None
    if "alembic_version" in tables:
        stamp = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    versions = schema_versions()
    found = str(stamp) if stamp is not None else f"{before} (before alembic)"
    if stamp == versions[0] or (stamp is None and before in (None, models.SCHEMA_VERSION)):
        return versions[0], []
    if stamp in versions or stamp is None:
        answer = f"take a copy, then: optuna storage upgrade --storage {shlex.quote(masked(url))}"
        return found, [Finding("schema", f"its tables are of an older Optuna: {found}, not {versions[0]}", answer)]
    text = f"its tables are of another Optuna, probably a newer one: {found}, not {versions[0]}"
    return found, [Finding("schema", text, "pip install -U optuna")]


def _inspect_rows(health: Health, session: Session) -> None:
    """Fill in studies and orphans, with what is to be said of them."""
    from optuna.storages._rdb import models
    from sqlalchemy import func

    study, trial = models.StudyModel, models.TrialModel
    rows = session.query(study.study_id, study.study_name).order_by(study.study_name)
    studies = {study_id: StudyState(study_id, name) for study_id, name in rows}
    counted = session.query(trial.study_id, trial.state, func.count(trial.trial_id))
    for study_id, state, count in counted.group_by(trial.study_id, trial.state):
        if study_id in studies:
            studies[study_id].counts[_WORDS[state]] = count
    _sort_running(session, studies)
    health.studies = list(studies.values())
    for table, column, parent in references():
        missing = session.query(func.count()).select_from(table).filter(is_orphan(column, parent)).scalar()
        if missing:
            health.orphans[table.name] = health.orphans.get(table.name, 0) + missing
    if health.orphans:
        listed = ", ".join(f"{count} in {table}" for table, count in health.orphans.items())
        text = f"rows of trials or studies that are not there: {listed}"
        health.findings.append(Finding("orphans", text, mendable=True))
    for state in health.studies:
        health.findings += _said_of(state, masked(health.url))


def _sort_running(session: Session, studies: Mapping[int, StudyState]) -> None:
    from optuna.storages._rdb import models
    from sqlalchemy import and_, func, select

    trial, attribute, heart = models.TrialModel, models.TrialUserAttributeModel, models.TrialHeartbeatModel
    # The database's own clock wrote the heartbeats, in its own time zone.
    now: datetime = session.execute(select(func.now())).scalar_one().replace(tzinfo=None)
    rows = (
        session.query(trial.study_id, trial.number, attribute.value_json, heart.heartbeat)
        .outerjoin(attribute, and_(attribute.trial_id == trial.trial_id, attribute.key == WORKER))
        .outerjoin(heart, heart.trial_id == trial.trial_id)
        .filter(trial.state == TrialState.RUNNING)
        .order_by(trial.study_id, trial.number)
    )
    for study_id, number, owner_json, heartbeat in rows:
        state = studies.get(study_id)
        owner = "" if owner_json is None else str(json.loads(owner_json))
        if state is None:
            continue
        if is_gone(owner):
            state.zombies.setdefault(owner, []).append(number)
        elif is_here(owner):
            continue
        elif heartbeat is not None and (now - heartbeat).total_seconds() > HEARTBEAT_SECONDS:
            state.silent.append(number)
        elif heartbeat is None:
            (state.elsewhere if owner else state.unowned).append(number)


def _said_of(state: StudyState, url: str) -> Iterator[Finding]:
    where = f"study {state.name!r}"
    if state.zombies:
        numbers = sorted(number for found in state.zombies.values() for number in found)
        text = f"{where}: {numbered(numbers)} running for a process of this host that is gone"
        yield Finding("zombies", text, "the next run of the study ends them as well", mendable=True)
    if state.silent:
        text = f"{where}: {numbered(state.silent)} running, no heartbeat for {HEARTBEAT_SECONDS / 60:.0f} minutes"
        answer = (
            f"if its process is gone: optuna tell --storage {shlex.quote(url)}"
            f" --study-name {shlex.quote(state.name)} --state fail --trial-number {state.silent[0]}"
        )
        yield Finding("silent", text, answer)
    if state.elsewhere:
        text = f"{where}: {numbered(state.elsewhere)} running on other hosts, which cannot be seen from here"
        yield Finding("elsewhere", text, wrong=False)
    if state.unowned:
        text = f"{where}: {numbered(state.unowned)} running for a program without a name, as plain Optuna scripts are"
        yield Finding("unowned", text, wrong=False)
    if state.counts["waiting"]:
        text = f"{where}: {state.counts['waiting']} queued and not yet taken"
        yield Finding("waiting", text, "the next run of the study takes them", wrong=False)


def numbered(numbers: Sequence[int]) -> str:
    """``trial 3``, ``trials 3, 4``, and of many the first ten."""
    more = f", ... ({len(numbers)} in all)" if len(numbers) > 10 else ""
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:10]))}{more}"


def references() -> Iterator[tuple[Any, Any, Any]]:
    """Each column of Optuna's that names a row of another table, parents before children: (table, column, named)."""
    from optuna.storages._rdb import models

    for table in models.BaseModel.metadata.sorted_tables:
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            yield table, key.parent, key.column


def is_orphan(column: Any, parent: Any) -> Any:
    """The SQL condition that a row names one that is not there."""
    from sqlalchemy import and_, exists

    return and_(column.is_not(None), ~exists().where(parent == column))


def _weights(
    url: str, session: Session, studies: Sequence[StudyState], kept: Mapping[str, set[int]]
) -> Iterator[Finding]:
    """Files that are missing (the best trial's, if it was trained here), and files that belong to no trial."""
    from optuna.storages._rdb import models

    trial, attribute = models.TrialModel, models.TrialUserAttributeModel
    unknown = dict(kept)
    for state in studies:
        folder = WeightsFolder(default_folder(url), state.name)
        if folder.path.name in unknown:
            numbers = {number for (number,) in session.query(trial.number).filter(trial.study_id == state.id)}
            unknown[folder.path.name] = unknown[folder.path.name] - numbers
        best = _best_trial(session, state.id)
        about: dict[str, Any] = {} if best is None else {
            key: json.loads(value)
            for key, value in session.query(attribute.key, attribute.value_json).filter(
                attribute.trial_id == best.trial_id, attribute.key.in_(("weights", WORKER))
            )
        }  # fmt: skip
        path = about.get("weights")
        if best is None or not isinstance(path, str) or not is_here(str(about.get(WORKER, ""))):
            continue
        if not Path(path).is_file() and not folder.file(best.number).is_file():
            text = f"study {state.name!r}: the weights of its best trial ({best.number}) are gone from {path}"
            yield Finding("weights-missing", text, "train it again from its stored hyperparameters")
    for name, left in unknown.items():
        if left:
            text = f"{default_folder(url) / name} has weights of trials that are not in it: {numbered(sorted(left))}"
            yield Finding("weights-unknown", text, "delete what you need no more", wrong=False)


def _best_trial(session: Session, study_id: int) -> Any:
    """The row of the best trial of a study with one objective, if one is complete."""
    from optuna.storages._rdb import models
    from optuna.study import StudyDirection

    directions = [row.direction for row in models.StudyDirectionModel.where_study_id(study_id, session)]
    if len(directions) != 1:
        return None
    find = models.TrialModel.find_min_value_trial_id
    if directions == [StudyDirection.MAXIMIZE]:
        find = models.TrialModel.find_max_value_trial_id
    try:
        return models.TrialModel.find_or_raise_by_id(find(study_id, 0, session), session)
    except ValueError:
        return None
