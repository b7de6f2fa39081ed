"""The best trial's weights, kept as a file beside the study while the search goes on.

A trial that is about to become the best writes its file before its end is told, so that the best trial of the storage
always has one; files of trials that are no longer the best are removed after it is told.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tuner.errors import TunerError
from tuner.storage_url import sqlite_path

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"trial-(\d+)\.pt")


def default_folder(url: str) -> Path:
    """``tuner-weights`` beside ``tuner.db``; in the working directory for a server."""
    path = sqlite_path(url)
    return path.with_name(f"{path.stem}-weights") if path is not None else Path("tuner-weights").absolute()


class WeightsFolder:
    """A folder with the weights of one study's best trial: ``FOLDER/STUDY/trial-N.pt``."""

    def __init__(self, folder: Path, study_name: str) -> None:
        self.path = folder / _file_name(study_name)

    def file(self, number: int) -> Path:
        """Where the weights of trial `number` are, if they are kept."""
        return self.path / f"trial-{number}.pt"

    def save(self, number: int, weights: Mapping[str, Tensor], hyperparameters: Mapping[str, Any]) -> Path:
        """Write a state dictionary and what it was trained with: the whole file, or none of it, whatever happens.

        ``torch.load(file, weights_only=True)["weights"]`` reads it back without executing anything. Raises `TunerError`
        where it cannot be written.
        """
        content = {"trial": number, "weights": dict(weights), "hyperparameters": _plain(dict(hyperparameters))}
        try:
            self._write(number, content)
        except OSError as error:
            raise TunerError(f"cannot keep the weights of trial {number} in {self.path}: {error.strerror}") from error
        return self.file(number)

    def _write(self, number: int, content: Mapping[str, Any]) -> None:
        import torch  # not above: `check` looks for the files only

        self.path.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".trial-{number}-", dir=self.path)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, self.file(number))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(self.path)

    def remove_others(self, best: int, finished: set[int]) -> None:
        """Remove the files of `finished` trials other than the `best` one; a running trial's file may be needed yet."""
        for number in numbers_in(self.path) & finished - {best}:
            self.file(number).unlink(missing_ok=True)


def numbers_in(path: Path) -> set[int]:
    """The trials whose weights are in the folder of a study."""
    found = [_NAME.fullmatch(file.name) for file in path.glob("trial-*.pt")]
    return {int(match[1]) for match in found if match}


def _file_name(study_name: str) -> str:
    """A name for a folder: short enough for every file system, and neither this folder nor the one above."""
    name = quote(study_name, safe=" ")
    if not name.strip("."):
        return name.replace(".", "%2E")
    return name if len(name) <= 200 else f"{name[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    """`value` in the types that a safe load accepts; what is of another type becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
