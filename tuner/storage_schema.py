"""Which version of Optuna made the tables of a storage. Others are refused, and never changed unasked."""

from __future__ import annotations

import functools
import sqlite3
from contextlib import closing
from pathlib import Path

import optuna

from tuner.errors import StorageError
from tuner.storage_url import BUSY_SECONDS, cannot_open, masked


def check_schema(url: str, path: Path) -> None:
    """Raise StorageError if other versions of Optuna made the tables, before the constructor adds its own to them."""
    from optuna.storages._rdb import models

    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        try:
            stamps, before = (
                connection.execute(f"SELECT {column} FROM {table}").fetchall() if table in tables else []
                for table, column in (("alembic_version", "version_num"), ("version_info", "schema_version"))
            )
        except sqlite3.Error as error:
            raise cannot_open(url, error) from None
    if stamps == [(schema_versions()[0],)] or (not stamps and before in ([], [(models.SCHEMA_VERSION,)])):
        return
    raise other_schema(url)


@functools.cache
def schema_versions() -> tuple[str, ...]:
    """The versions of the tables that this Optuna knows, its own first."""
    from alembic.script import ScriptDirectory
    from optuna.storages._rdb import models

    history = ScriptDirectory(str(Path(models.__file__).with_name("alembic")))
    return tuple(script.revision for script in history.walk_revisions())


def other_schema(url: str) -> StorageError:
    """What to say of tables that another version of Optuna made."""
    return StorageError(
        f"wanted tables of Optuna {optuna.__version__}, found those of another version in {masked(url)}; copy it, then"
        f" run: optuna storage upgrade --storage '{masked(url)}' (or install the Optuna that made it, if that is newer)"
    )
