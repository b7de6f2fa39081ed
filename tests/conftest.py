"""What all tests share: a quiet environment, a working directory of their own, and when a test may be skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported, and for every process that a test starts: one thread, so that results repeat and two cores
# suffice; the tree, so that `python -m tuner.X` is this one from any directory; nothing of the caller's own set-up.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = str(ROOT)
# Measured plans are remembered here, not in the home of who runs the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="tuner-tests-cache-")
for _name in ("OPTUNA_STORAGE", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own empty working directory, so that no test leaves a tuner.db in the tree."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


def _skips_are_failures() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI everything but a GPU can be had, so a test that is skipped there for another reason is a failure."""
    report = yield
    expected = item.get_closest_marker("cuda") is not None or hasattr(report, "wasxfail")
    if report.skipped and not expected and _skips_are_failures():
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file that asks to be skipped."""
    report = yield
    if report.outcome == "skipped" and _skips_are_failures():
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} may not be skipped in CI: {report.longrepr}"
    return report
