"""Browse a storage: optuna-dashboard on the right file, bound to this machine, and read-only unless asked.

What is read-only is refused twice: every request that is not a question gets a 403 with the reason, and the connections
to SQLite cannot write. A request under another host's name is refused as well: a page of a stranger could otherwise
point its own name at this address and read the studies (DNS rebinding).
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import socket
import socketserver
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tuner.errors import Interrupted, StorageError, TunerError, UsageError
from tuner.interrupt import Interrupt

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

HOST = "127.0.0.1"
PORT = 8080
PORTS_TRIED = 100

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request; none of them outlives the command."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, app: App) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), QuietHandler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without asking the network for this machine's name, as the base class does: that can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nobody's error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class QuietHandler(WSGIRequestHandler):
    """Keeps no access log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page asks every few seconds."""


def guarded(app: App, *, hosts: frozenset[str] | None, writable: bool) -> App:
    """`app`, for requests to one of `hosts` (None: to any), and for those that change nothing unless `writable`."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        reason = ""
        if hosts is not None and _hostname(f"//{host}") not in hosts:
            reason = "this dashboard answers on the machine it runs on only, by the name 127.0.0.1 or localhost"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            if not writable:
                reason = "this dashboard is read-only; start it with --writable to change studies"
            elif origin is not None and urlsplit(origin).netloc != host:
                reason = "a page of another site may not change studies"
        if not reason:
            return app(environ, start_response)
        body = json.dumps({"reason": reason}).encode()
        start_response("403 Forbidden", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return application


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int | None, app: App) -> Server:
    """A server that listens at `port`, or at the first free one from 8080 on. Raises UsageError."""
    for candidate in range(PORT, PORT + PORTS_TRIED) if port is None else [port]:
        try:
            return Server(host, candidate, app)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"wanted to listen at {host}:{candidate}, found: {error.strerror}; try --host 127.0.0.1 and a"
                    " --port above 1023"
                ) from None
    if port is not None:
        raise UsageError(f"wanted to listen at {host}:{port}, found the port taken; leave out --port for a free one")
    last = PORT + PORTS_TRIED - 1
    raise UsageError(f"wanted a free port from {PORT} to {last} at {host}, found none; choose another with --port")


def open_for_reading(url: str) -> RDBStorage:
    """The storage at the canonical `url`, which must exist. Makes and changes nothing. Raises StorageError."""
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import QueuePool

    from tuner.storage import sqlite_path
    from tuner.storage_url import BUSY_SECONDS, cannot_open, check_file, check_place

    path = sqlite_path(url)
    options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
    if path is not None:
        check_place(path)
        check_file(path, create=False)
        address = f"file:{quote(str(path))}?mode=rw"

        def connect() -> sqlite3.Connection:
            # Not mode=ro: in a write-ahead log that leaves the -wal and -shm files behind, with the last trials in
            # them. No transaction around what is read either: it would hold back the writers of a file without one.
            connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
            connection.execute("PRAGMA query_only = ON")
            return connection

        options = {"creator": connect, "poolclass": QueuePool}
    name = "sqlite://" if path is not None else url.replace("{", "{{").replace("}", "}}")
    try:
        return RDBStorage(name, engine_kwargs=options, skip_table_creation=True)
    except (SQLAlchemyError, StorageInternalError, ImportError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        raise cannot_open(url, cause if isinstance(cause, Exception) else error) from None
    except RuntimeError as error:  # of another version of Optuna
        raise StorageError(" ".join(str(error).split())) from None


def serve(args: argparse.Namespace) -> None:
    """Open the storage, listen, say where, and answer until a signal ends it."""
    from tuner.storage import masked, open_storage, resolve_url

    url = resolve_url(args.storage, os.environ, Path.cwd())
    storage = open_storage(url, create=False) if args.writable else open_for_reading(url)

    import optuna
    import optuna_dashboard

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    local = is_loopback(args.host)
    hosts = frozenset({"127.0.0.1", "localhost", "::1", args.host.lower()}) if local else None
    app: App = guarded(optuna_dashboard.wsgi(storage), hosts=hosts, writable=args.writable)
    with bind(args.host, args.port, app) as server:
        if not local:
            print(f"warning: everybody who can reach {args.host} can open this page; it has no login", file=sys.stderr)
        how = "its buttons write" if args.writable else "read-only"
        print(f"dashboard of {masked(url)} ({how}); Ctrl-C ends it", file=sys.stderr)
        name = f"[{args.host}]" if ":" in args.host else args.host
        print(f"http://{name}:{server.server_port}/dashboard", flush=True)
        server.serve_forever()


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise ValueError
    return port


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tuner.dashboard",
        description="Browse studies with optuna-dashboard, in a browser on this machine. Prints the address.",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="SQLite file or storage URL (default: OPTUNA_STORAGE, else tuner.db in this directory)",
    )
    parser.add_argument("--host", default=HOST, help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, help=f"port to listen at; 0 takes any (default: the first free one from {PORT} on)"
    )
    parser.add_argument("--writable", action="store_true", help="let the page's buttons rename, edit and delete")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = parse(argv)
    interrupt = Interrupt()
    try:
        with interrupt.listening(), interrupt.interruptible():
            serve(args)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except TunerError as error:
        if args.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
