"""Who trains a trial, and whether that process still lives: a name that no other process, earlier or later, has."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """``HOST:PID:START``, where START tells a process from a later one that was given the same PID."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start(os.getpid())}"


def is_here(owner: str) -> bool:
    """Whether `owner` is, or was, a process of this host."""
    return owner.rpartition(":")[0].rpartition(":")[0] == socket.gethostname()


def is_gone(owner: str) -> bool:
    """Whether `owner` was a process of this host that has ended; False where nobody here can tell."""
    rest = owner.split(":")[-2:]
    if not is_here(owner) or len(rest) != 2 or not rest[0].isdigit():
        return False
    pid = int(rest[0])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    if _fields(pid)[:1] == ["Z"]:  # It has ended, and its parent has not asked how.
        return True
    return rest[1] != "?" and _start(pid) not in (rest[1], "?")


def _start(pid: int) -> str:
    """The kernel's start time of a process, in clock ticks since boot; ``?`` where it cannot be had."""
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 else "?"


def _fields(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; empty where nothing is said."""
    try:
        # The command's name, in parentheses, may hold spaces: count fields behind it.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
