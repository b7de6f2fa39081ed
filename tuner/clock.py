"""Where the time went: a stopwatch that gives every second to exactly one part, so that parts add up to the whole.

A stopwatch is read at the *end* of a part (`lap`); what passed since the last reading belongs to that part. There is
nothing to forget to close, and no second that belongs to nobody or to two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by part, on a monotonic clock.

    The reader must wait for the device before a lap that ends work of the device: see `tuner.device.synchronize`.
    """

    now: Callable[[], float] = time.perf_counter
    totals: dict[str, float] = field(default_factory=dict)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.now()

    def lap(self, part: str) -> float:
        """Give the seconds since the last lap to `part`, and return them."""
        now = self.now()
        seconds = now - self._last
        self._last = now
        self.totals[part] = self.totals.get(part, 0.0) + seconds
        return seconds

    def move(self, seconds: float, part: str, to: str) -> None:
        """Give `seconds` that were counted under `part` to the part `to`, which knows them better."""
        self.totals[part] = self.totals.get(part, 0.0) - seconds
        self.totals[to] = self.totals.get(to, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds between the start and the last lap: the sum of the parts."""
        return sum(self.totals.values())
