"""Ctrl-C and SIGTERM: training is interrupted at once, a write to the storage never.

A signal between the commit that creates a trial and the line that remembers it would leave a RUNNING row behind. So the
handler raises only while the program says that it may (`interruptible`); elsewhere the signal waits for `check`. A
second signal ends the process at once, whatever it does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tuner.errors import Interrupted


class Interrupt:
    """The signals of one process; `meaning` says what they mean, in words.

    Without `listening` it does nothing, so that a library user's own handlers stay.
    """

    def __init__(self, meaning: str = "") -> None:
        self.received: int | None = None
        self._meaning = meaning
        self._open = False

    @contextmanager
    def listening(self, numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
        """Handle the signals inside the block; the earlier handlers come back behind it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that a signal may leave at any instruction, by raising `Interrupted`."""
        self.check()
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.received is not None:
            raise Interrupted(self.received, self._meaning)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self.received = number
        if self._open:
            self._open = False
            raise Interrupted(number, self._meaning)
