"""Optuna's own tests for storages hold, on SQLite and on PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.storages import BaseStorage
from optuna.testing.pytest_storages import StorageTestCase

from tuner.storage import Storage, open_storage, resolve_url

pytest_plugins = "postgres"


@pytest.fixture(scope="module")
def made_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new storage, to be copied: that takes less time than to make the tables."""
    directory = tmp_path_factory.mktemp("made")
    open_storage(resolve_url("study.db", {}, directory)).close()
    return directory / "study.db"


class TestSQLite(StorageTestCase):
    """The storage that `open_storage` returns for a file."""

    @pytest.fixture
    def storage(self, made_file: Path, tmp_path: Path) -> Iterator[BaseStorage]:
        shutil.copy(made_file, tmp_path / "study.db")
        opened = open_storage(resolve_url("study.db", {}, tmp_path))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def on_a_server(shared_postgres_url: str) -> Iterator[Storage]:
    """One storage for all tests, which is emptied before each."""
    opened = open_storage(shared_postgres_url)
    yield opened
    opened.close()


class TestPostgreSQL(StorageTestCase):
    """The storage that `open_storage` returns for a database of a server."""

    @pytest.fixture
    def storage(self, on_a_server: Storage) -> BaseStorage:
        with on_a_server.engine.begin() as connection:
            connection.exec_driver_sql("TRUNCATE studies CASCADE")
        return on_a_server
