"""Tiny study files for tests: a linear model on a dozen examples, which trains in a millisecond; each part can be given
as source text."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import optuna
import psutil

from tuner.storage import open_storage, resolve_url

PARTS = {
    "head": "",
    "data": """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(13, 3, generator=generator)
        y = x.sum(dim=1, keepdim=True)
        return Splits((x[:7], y[:7]), (x[7:10], y[7:10]), (x[10:], y[10:]))
    """,
    "space": """
        return {
            "lr": trial.suggest_float("lr", 1e-3, 0.3, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [2, 4]),
        }
    """,
    "model": "return nn.Linear(3, 1)",
    "loss": "return nn.functional.mse_loss(output, target)",
    "metric": "return (output - target).abs().mean()",
    "spec": 'name="tiny", epochs=3',
}

TEMPLATE = '''"""A tiny study for tests."""

import os, time
import torch
from torch import nn
from tuner import Splits, StudySpec
{head}

def data():
{data}

def space(trial):
{space}

def model(hyperparameters):
{model}

def loss(output, target):
{loss}

def metric(output, target):
{metric}

spec = StudySpec(data=data, space=space, model=model, loss=loss, metrics={{"error": metric}}, {spec})
'''

SLOW = """
        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(0.05)
                return super().forward(x)
        return Slow(3, 1)
"""
"""A model that takes 0.05 s for each batch."""


def study_file(folder: Path, name: str = "tiny.py", **parts: str) -> Path:
    """A study file in `folder`; `parts` are bodies of its functions, text for its head, or arguments of its spec."""
    unknown = set(parts) - set(PARTS)
    assert not unknown, unknown
    texts = {}
    for key, text in (PARTS | parts).items():
        clean = textwrap.dedent(text).strip("\n")
        texts[key] = clean if key in ("head", "spec") else textwrap.indent(clean, "    ")
    path = folder / name
    path.write_text(TEMPLATE.format(**texts), encoding="utf-8")
    return path


def command(*arguments: str | Path) -> list[str]:
    """The command line of ``python -m tuner.run``."""
    return [sys.executable, "-m", "tuner.run", *map(str, arguments)]


def start(*arguments: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """``python -m tuner.run`` in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    *arguments: str | Path, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m tuner.run``, waited for."""
    return finish(start(*arguments, cwd=cwd, environ=environ))


def finish(process: subprocess.Popen[str], timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Wait for a started command; its group is killed if it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        end_group(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill whatever is left of a command."""
    for left in group(process.pid):
        with suppress(psutil.Error):
            left.kill()
    process.kill()
    process.wait()


def group(leader: int) -> list[psutil.Process]:
    """The living processes of a command that `start` started, its helpers included."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def trials(storage: Path, name: str = "tiny") -> list[optuna.trial.FrozenTrial]:
    """All trials of a study in a SQLite file; none if it is not there yet."""
    if not storage.exists():
        return []
    opened = open_storage(resolve_url(str(storage), {}, Path.cwd()), create=False)
    try:
        return opened.get_all_trials(opened.get_study_id_from_name(name))
    except KeyError:
        return []
    finally:
        opened.close()


def states(storage: Path, name: str = "tiny") -> list[str]:
    """The state of each trial, by number."""
    return [trial.state.name for trial in trials(storage, name)]


def params_of(found: Sequence[optuna.trial.FrozenTrial]) -> list[tuple[tuple[str, object], ...]]:
    """The hyperparameters of trials, comparable and hashable."""
    return [tuple(sorted(trial.params.items())) for trial in found]


def running(storage: Path) -> list[str]:
    """The owners of the trials that are running now, read beside a command that writes."""
    if not storage.exists():
        return []
    with closing(sqlite3.connect(storage, timeout=30)) as connection, suppress(sqlite3.OperationalError):
        found = connection.execute(
            "SELECT json_extract(value_json, '$') FROM trials JOIN trial_user_attributes USING (trial_id)"
            " WHERE state = 'RUNNING' AND key = 'worker' ORDER BY number"
        )
        return [owner for (owner,) in found]
    return []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 90) -> None:
    """Wait until something is so; fails if it takes too long, or if the command ends before."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            end_group(process)
            out, err = process.communicate(timeout=30)
            raise AssertionError(f"it never was so; exit code {process.returncode}\n{out}\n{err}")
        time.sleep(0.05)


def wait_until_gone(leader: int, timeout: float = 20) -> None:
    """Wait until no process of a command is left."""
    deadline = time.monotonic() + timeout
    while left := group(leader):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
