"""Optuna's own tests for storages hold, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.storages import BaseStorage
from optuna.testing.pytest_storages import StorageTestCase

from tuner.storage import open_storage, resolve_url

pytest_plugins = "postgres"


class TestSQLite(StorageTestCase):
    """The storage that `open_storage` returns for a file."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[BaseStorage]:
        opened = open_storage(resolve_url("study.db", {}, tmp_path))
        yield opened
        opened.close()


class TestPostgreSQL(StorageTestCase):
    """The storage that `open_storage` returns for a database of a server."""

    @pytest.fixture
    def storage(self, postgres_url: str) -> Iterator[BaseStorage]:
        opened = open_storage(postgres_url)
        yield opened
        opened.close()
