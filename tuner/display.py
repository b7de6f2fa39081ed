"""What a person sees of a run on stderr: a live table on a terminal, plain lines elsewhere, from the same events.

A run may finish a trial an hour or thousands a second. The table is drawn at most four times a second, and lines of
quick trials are gathered, so that showing never costs what training earns. rich is loaded only for the table.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO, cast

from optuna.trial import TrialState

from tuner.progress import STATES, Tally, clean, named, readable, trial_line
from tuner.results import EpochDone, Event, Finished, Notice, Started, Summary

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

REDRAW_SECONDS = 0.25
"""Seconds between two drawings of the table, at least."""

GATHER_SECONDS = 0.5
"""Seconds between two lines about quick trials, at least."""

QUICK_TRIALS = 10
"""So many trials ended within a second are quick: their lines are gathered."""

STATUS_SECONDS = 60.0
"""Seconds between two plain lines about the whole run, at least."""

RUNNING_ROWS = 8
"""Running trials with a row of their own in the table."""


class Lasting(io.TextIOBase):
    """`stream`, which falls silent when what it writes to goes away: rich would end the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream: rich draws with its characters."""
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Write, if there is anybody to read."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        with suppress(OSError):
            self._stream.flush()


class PlainLines:
    """A line for each ended trial; while trials are quick, one line for many."""

    def __init__(self, write: Callable[[str], None], tally: Tally, now: float) -> None:
        self._write = write
        self._tally = tally
        self._ends: deque[float] = deque(maxlen=QUICK_TRIALS)
        self._pending: list[Finished] = []
        self._new_best = False
        self._last_line = -math.inf
        self._last_status = now

    def finished(self, event: Finished, new_best: bool, now: float) -> None:
        """Write or gather the line of an ended trial."""
        self._ends.append(now)
        quick = len(self._ends) == QUICK_TRIALS and now - self._ends[0] < 1.0
        if not quick:
            self.flush(now)
        self._pending.append(event)
        self._new_best |= new_best
        if not quick:
            self.flush(now)

    def tick(self, now: float) -> None:
        """Write what has waited long enough."""
        if self._pending and now - self._last_line >= GATHER_SECONDS:
            self.flush(now)
        if now - self._last_status >= STATUS_SECONDS:
            self._last_status = now
            of = "" if self._tally.goal is None else f" of {self._tally.goal}"
            parts = [f"{self._tally.done}{of} trials", self._tally.pace(now), self._tally.best_text()]
            self._write("; ".join(part for part in parts if part))

    def flush(self, now: float) -> None:
        """Write what is gathered."""
        if self._pending:
            first, *others = self._pending
            line = self._gathered() if others else trial_line(first, self._tally.objective, self._new_best)
            self._write(line)
            self._pending.clear()
            self._new_best = False
            self._last_line = now

    def _gathered(self) -> str:
        numbers = sorted(event.number for event in self._pending)
        low, high, count = numbers[0], numbers[-1], len(numbers)
        which = f"trials {low}-{high}" if high - low + 1 == count else f"{count} trials of {low}-{high}"
        states = Counter(event.state for event in self._pending)
        parts = [f"{states[state]} {word}" for state, word in STATES.items() if states[state]]
        failed = next((event for event in self._pending if event.state == TrialState.FAIL), None)
        if failed is not None and failed.reason:
            parts[-1] += f" ({clean(failed.reason)})"
        if self._new_best:
            parts.append(f"new best {self._tally.best_text()}")
        elif self._tally.best is not None:
            parts.append(f"best {readable(self._tally.best[0])}")
        elif self._tally.latest is not None:
            parts.append(f"latest {named(self._tally.objective, self._tally.latest.values)}")
        return f"{which}: {', '.join(parts)}"


class LiveTable:
    """The state of the run in one table, drawn over itself."""

    def __init__(self, stream: TextIO, color: bool, errors: bool, tally: Tally, device: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tally = tally
        self._device = device
        self._last = -math.inf
        # Warnings of other libraries go through stderr as well, and would tear the table.
        self._console = Console(
            file=stream, force_terminal=True, color_system="auto" if color else None, highlight=False, markup=False
        )
        self._live: Live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=errors
        )
        self._live.start()

    def tick(self, now: float) -> None:
        """Draw, unless it was drawn a moment ago."""
        if now - self._last >= REDRAW_SECONDS:
            self.draw(now)

    def draw(self, now: float) -> None:
        """Draw the table as it is now."""
        self._last = now
        self._live.update(self._table(now), refresh=True)

    def print(self, line: str) -> None:
        """A line above the table."""
        self._console.print(line, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last table on the terminal and give the cursor back."""
        self._live.stop()

    def _table(self, now: float) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tally, start, ended = self._tally, self._tally.start, self._tally.ended
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        rows = len(tally.running)
        before = (start.complete, start.pruned, start.failed)
        study = ", ".join(f"{b + ended[s]} {w}" for b, (s, w) in zip(before, STATES.items(), strict=True))
        grid.add_row("study", f"{study}, {start.running + rows} running")
        run = ", ".join(f"{ended[s]} {w}" for s, w in STATES.items())
        grid.add_row("this run", f"{run}, {rows} running")
        if tally.goal:
            grid.add_row("", ProgressBar(total=tally.goal, completed=tally.done, width=40))
        of = "" if tally.goal is None else f" of {tally.goal}"
        grid.add_row("progress", ", ".join(part for part in (f"{tally.done}{of} trials", tally.pace(now)) if part))
        if tally.best is not None:
            grid.add_row("best", Text(tally.best_text(), style="green"))
        elif tally.latest is not None:
            latest = tally.latest
            grid.add_row("latest", Text(f"{named(tally.objective, latest.values)} in trial {latest.number}"))
        grid.add_row("device", Text(clean(self._device)))
        if tally.failure is not None:
            grid.add_row("failed", Text(f"trial {tally.failure.number}: {clean(tally.failure.reason)}", style="red"))
        for number, epoch in list(tally.running.items())[:RUNNING_ROWS]:
            grid.add_row(f"trial {number}", Text(self._running(epoch)))
        if rows > RUNNING_ROWS:
            grid.add_row("", f"and {rows - RUNNING_ROWS} more")
        return grid

    def _running(self, epoch: EpochDone | None) -> str:
        if epoch is None:
            return "started"
        return f"epoch {epoch.epoch + 1} of {epoch.epochs}, {clean(self._tally.objective)} {readable(epoch.value)}"


class Display:
    """Shows a run to a person, event by event.

    `goal` is how many trials this command adds at most (None: unknown); `start` the study before it; `now` a clock in
    seconds. A terminal that goes away ends the showing, never the run.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        live: bool,
        color: bool,
        objective: str,
        maximize: bool,
        goal: int | None,
        device: str,
        start: Summary,
        now: Callable[[], float],
    ) -> None:
        self._stream = cast(TextIO, Lasting(stream))
        self._errors = stream is sys.stderr
        self._wants_live = live
        self._color = color
        self._device = device
        self._now = now
        self._tally = Tally(objective, maximize, goal, start)
        self._plain = PlainLines(self._write, self._tally, now())
        self._table: LiveTable | None = None

    def __enter__(self) -> Self:
        if self._wants_live:
            self._table = LiveTable(self._stream, self._color, self._errors, self._tally, self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        table, self._table = self._table, None
        if table is None:
            self._plain.flush(self._now())
        else:
            self._tally.running.clear()
            table.draw(self._now())
            table.stop()

    def update(self, event: Event) -> None:
        """Take an event of the run; shows it now, or later together with others."""
        now = self._now()
        if isinstance(event, EpochDone):
            self._tally.epoch_done(event)
        elif isinstance(event, Started):
            self._tally.started(event, now)
        elif isinstance(event, Finished):
            new_best = self._tally.finished(event, now)
            if self._table is None:
                self._plain.finished(event, new_best, now)
        elif isinstance(event, Notice):
            self.note(event.text)
        (self._plain if self._table is None else self._table).tick(now)

    def note(self, text: str) -> None:
        """Lines for the person that are about no trial."""
        for line in text.splitlines():
            self._write(clean(line, 1000))

    def _write(self, line: str) -> None:
        if self._table is not None:
            self._table.print(line)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def open_display(
    stream: TextIO,
    environ: Mapping[str, str],
    *,
    objective: str,
    maximize: bool,
    goal: int | None,
    device: str,
    start: Summary,
    now: Callable[[], float] = time.monotonic,
) -> Display:
    """The display for `stream`: live on a terminal that can redraw, in color unless ``NO_COLOR`` is set."""
    live = stream.isatty() and environ.get("TERM") != "dumb"
    color = live and not environ.get("NO_COLOR")
    return Display(
        stream,
        live=live,
        color=color,
        objective=objective,
        maximize=maximize,
        goal=goal,
        device=device,
        start=start,
        now=now,
    )
