"""What this machine offers to a run: versions, cores, accelerators and their memory. Loads torch and all else."""

from __future__ import annotations

import platform
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import optuna
import sqlalchemy
import torch

from tuner import device


@dataclass(frozen=True)
class Accelerator:
    """A device beside the CPU; memory in bytes, None where nobody knows."""

    name: str
    description: str
    memory: int | None
    free: int | None


@dataclass(frozen=True)
class Machine:
    """Versions of what a run is built on, usable cores, bytes free beside the storage; what a run takes, and why."""

    versions: dict[str, str]
    system: str
    processor: str
    cores: int
    accelerators: tuple[Accelerator, ...]
    folder: str
    free_disk: int
    chosen: str
    why: str


def look_around(folder: Path) -> Machine:
    """Ask PyTorch and the system; `folder` is where the storage is."""
    choice = device.choose()
    return Machine(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "optuna": optuna.__version__,
            "sqlalchemy": sqlalchemy.__version__,
            "sqlite": sqlite3.sqlite_version,
        },
        system=platform.platform(),
        processor=device.describe(torch.device("cpu")).removeprefix("cpu "),
        cores=device.cores(),
        accelerators=tuple(_accelerators()),
        folder=str(folder),
        free_disk=shutil.disk_usage(folder).free,
        chosen=str(choice.device),
        why=choice.why,
    )


def _accelerators() -> list[Accelerator]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return []
    found = []
    for index in range(torch.accelerator.device_count()):
        each = torch.device(accelerator.type, index)
        description = device.describe(each).removeprefix(str(each)).strip()
        try:
            memory, free = device.total_bytes(each), device.free_bytes(each)
        except RuntimeError as error:  # it is there, but does not work; `chosen` and `why` say it for the first one
            description, memory, free = f"{description} ({str(error).strip().partition(chr(10))[0]})", None, None
        found.append(Accelerator(str(each), description, memory, free))
    return found
