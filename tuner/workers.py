"""One command's workers: this process, or several spawned ones that send their events here.

The processes share nothing but the storage and a pipe each to the parent, which hands out the budget: a worker that is
killed takes no lock along, and its trial is ended by the parent. Workers are spawned, never forked, and the parent of
several does not touch the device, so that each can start CUDA afresh.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import optuna
import torch

from tuner import device as devices
from tuner.assignment import Assignment, make_search
from tuner.clock import Stopwatch
from tuner.data import prepare
from tuner.errors import Interrupted, TunerError
from tuner.interrupt import Interrupt
from tuner.results import Event, Finished, Notice, Spent
from tuner.search import Budget
from tuner.spec import one_line
from tuner.storage import open_storage
from tuner.study_file import load_spec

GOODBYE_SECONDS = 4.0
"""How long a worker that was told to stop may take to end its trial, before it is killed."""

DEATHS_IN_A_ROW = 3
"""So many workers that die without having finished a trial end the run."""


def run_workers(assignment: Assignment, count: int, budget: Budget, interrupt: Interrupt) -> Iterator[Event]:
    """Events of `count` spawned workers. Raises the `TunerError` that ended one of them, or `Interrupted`."""
    team = _Team(assignment, budget, interrupt)
    try:
        for index in range(count):
            team.spawn(index)
        yield from team.events()
    except BaseException as error:
        for event in team.dismiss():
            if not isinstance(error, GeneratorExit):
                yield event
        raise


@dataclass
class _Worker:
    index: int
    process: BaseProcess
    pipe: Connection
    owner: str = ""
    granted: int = 0
    finished: int = 0
    said_goodbye: bool = False


class _Team:
    """The spawned workers of one command, seen from their parent."""

    def __init__(self, assignment: Assignment, budget: Budget, interrupt: Interrupt) -> None:
        self._assignment = assignment
        self._budget = budget
        self._interrupt = interrupt
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._storage = open_storage(assignment.url, create=False)
        self._study_id = self._storage.get_study_id_from_name(assignment.study_name)
        self._deaths = 0

    def spawn(self, index: int) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (self._assignment, index, theirs)
        process = self._context.Process(target=work, args=arguments, name=f"tuner-worker-{index}")
        # A terminal's Ctrl-C goes to all processes: one that is still importing would die of it with a traceback. The
        # tracker comes first, since starting it lets the signal through again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._workers.append(_Worker(index, process, ours))

    def events(self) -> Iterator[Event]:
        while self._workers:
            with self._interrupt.interruptible():
                ready = multiprocessing.connection.wait([w.pipe for w in self._workers])
            for worker in [w for w in self._workers if w.pipe in ready]:
                yield from self._hear(worker)

    def dismiss(self) -> Iterator[Event]:
        """End all workers: what they still tell is passed on; who does not end in time is killed."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + GOODBYE_SECONDS
        while self._workers and (left := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait([w.pipe for w in self._workers], timeout=left)
            for worker in [w for w in self._workers if w.pipe in ready]:
                message = _receive(worker)
                if isinstance(message, Event):
                    yield message
                elif message is None:
                    yield from self._bury(worker)
                elif message == "take":
                    _send(worker.pipe, False)
                elif isinstance(message, str) and message.startswith("owner "):
                    worker.owner = message.removeprefix("owner ")
        for worker in list(self._workers):
            worker.process.kill()
            yield from self._bury(worker)

    def _hear(self, worker: _Worker) -> Iterator[Event]:
        """One message of a worker: an event, a question, its end."""
        message = _receive(worker)
        if message == "take":
            granted = self._budget.take()
            worker.granted += granted
            _send(worker.pipe, granted)
        elif isinstance(message, int):
            worker.granted -= message
            self._budget.give_back(message)
        elif isinstance(message, str):
            worker.owner = message.removeprefix("owner ")
        elif isinstance(message, BaseException):
            worker.said_goodbye = True
            raise message
        elif message is None:
            yield from self._bury(worker)
            if not worker.said_goodbye:
                yield from self._replace(worker)
        else:
            worker.said_goodbye = isinstance(message, Spent)
            worker.finished += isinstance(message, Finished)
            yield message

    def _bury(self, worker: _Worker) -> Iterator[Event]:
        """A worker's process has ended: so do the trials that it leaves behind."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        if worker.owner:
            reason = f"its worker ended with exit code {worker.process.exitcode}"
            for number in self._storage.fail_trials_of(self._study_id, worker.owner, reason):
                yield Notice(f"trial {number} failed: {reason}")
            # What was granted to it and never became a trial.
            unused = worker.granted - self._storage.started_by(self._study_id, worker.owner)
            self._budget.give_back(max(0, unused))

    def _replace(self, worker: _Worker) -> Iterator[Event]:
        self._deaths = 0 if worker.finished else self._deaths + 1
        code = worker.process.exitcode
        if self._deaths >= DEATHS_IN_A_ROW:
            raise TunerError(f"{self._deaths} workers in a row died before they finished a trial; exit code {code}")
        yield Notice(f"worker {worker.index} died with exit code {code}; another one takes its place")
        self.spawn(worker.index)


def work(assignment: Assignment, index: int, pipe: Connection) -> None:
    """The life of a spawned worker: load, search, send each event to the parent, or the error that ended it."""
    watch = Stopwatch()
    # The terminal sends Ctrl-C to every process of the command; the parent decides, and tells by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr  # The command's stdout is for its results.
    interrupt = Interrupt("the command was ended")
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    try:
        with interrupt.listening([signal.SIGTERM]):
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            torch.set_num_threads(assignment.threads)
            devices.keep_host_memory()
            loaded = load_spec(assignment.source)
            device = devices.choose(_own_device(assignment.device, index)).device
            watch.lap("start")
            data = prepare(loaded.spec.data(), device, loaded.origin)
            watch.lap("data")
            budget = _AskedBudget(pipe)
            search = make_search(assignment, loaded, data, device, budget, watch, interrupt, index)
            pipe.send(f"owner {search.teller.worker}")
            watch.lap("start")
            for event in search.events():
                pipe.send(event)
    except Interrupted:
        pass
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # The parent is gone; the trial has been ended.
    except TunerError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(TunerError(f"worker {index}: {one_line(error)}"))


@dataclass
class _AskedBudget:
    """The parent's budget, asked for over the pipe."""

    pipe: Connection

    def take(self) -> bool:
        self.pipe.send("take")
        return bool(self.pipe.recv())

    def give_back(self, count: int) -> None:
        self.pipe.send(count)


def _own_device(name: str, index: int) -> str:
    """Workers take the accelerators in turn, unless one was named."""
    if name in ("auto", "cuda", "xpu") and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and torch.accelerator.device_count() > 1:
            return f"{kind.type}:{index % torch.accelerator.device_count()}"
    return name


def _outlive_nobody() -> None:
    """End this process soon after its parent, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GOODBYE_SECONDS)
        os._exit(1)


def _receive(worker: _Worker) -> Any:
    """The next message, or None at the end of the pipe; a message that a kill cut short is one."""
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        return None


def _send(pipe: Connection, answer: bool) -> bool:
    try:
        pipe.send(answer)
    except OSError:
        return False
    return True
