"""Drive a real browser without a screen: the page as a person would see it, after its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,1500",
)


def page(url: str, profile: Path, *, picture: Path | None = None, seconds: int = 2) -> str:
    """The document at `url` as HTML, after `seconds` of its own time (which passes as fast as it can work).

    What a browser keeps is kept in the directory `profile`; `picture` is where to put a screenshot (PNG).
    """
    browser = next((path for path in map(shutil.which, NAMES) if path), None)
    assert browser, f"wanted a browser, found none of {', '.join(NAMES)}; install chromium"
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * seconds}", "--dump-dom"]
    if picture is not None:
        command.append(f"--screenshot={picture}")
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
