"""What a person sees of a run."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial

from tuner.display import Display, open_display
from tuner.progress import Tally, clean, duration, readable
from tuner.results import EpochDone, Finished, Notice, Started, Summary

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
PARAMS = {"lr": 0.123456, "batch_size": 32, "nesterov": True}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and counts how often it is written to."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def show(stream: io.StringIO, clock: Clock, **changes: Any) -> Display:
    settings: dict[str, Any] = {
        "objective": "validation loss",
        "maximize": False,
        "goal": 10,
        "device": "cpu",
        "start": Summary(),
    }
    return open_display(stream, changes.pop("environ", {"TERM": "xterm-256color"}), now=clock, **(settings | changes))


def finished(
    number: int, value: float | None = None, state: TrialState = COMPLETE, reason: str = "", **changes: Any
) -> Finished:
    params: Mapping[str, Any] = changes.pop("params", PARAMS)
    values = changes.pop("values", (value,) if value is not None else ())
    return Finished(number, state, values, params, 0.314, changes.pop("epochs", 4), "w0", reason)


def text_of(stream: io.StringIO) -> str:
    """What was written to a terminal, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def last_table(stream: io.StringIO) -> str:
    """The table that was drawn last."""
    text = text_of(stream)
    return text[text.rindex("study ") :]


def test_a_finished_trial_is_one_plain_line() -> None:
    """Number, state, value, time and hyperparameters, rounded; a new best is marked, other ends explained."""
    stream, clock = io.StringIO(), Clock()
    with show(stream, clock) as display:
        for event in (
            finished(12, 0.08531234),
            finished(13, 0.2),
            finished(14, state=PRUNED, reason="worse than the median"),
            finished(15, state=FAIL, reason="loss is nan at epoch 0", epochs=0, params={}),
            finished(16, 0.0712),
        ):
            clock.time += 1
            display.update(event)
    assert stream.getvalue().splitlines() == [
        "trial 12 complete  validation loss 0.08531 (new best)  0.31 s  lr=0.1235 batch_size=32 nesterov=True",
        "trial 13 complete  validation loss 0.2  0.31 s  lr=0.1235 batch_size=32 nesterov=True",
        "trial 14 pruned  after 4 epochs: worse than the median  0.31 s  lr=0.1235 batch_size=32 nesterov=True",
        "trial 15 failed  loss is nan at epoch 0  0.31 s",
        "trial 16 complete  validation loss 0.0712 (new best)  0.31 s  lr=0.1235 batch_size=32 nesterov=True",
    ]


def test_the_best_of_the_study_before_the_run_is_the_one_to_beat() -> None:
    """A value worse than the best of an earlier run is no new best; with `maximize` larger is better."""
    best = create_trial(value=0.5)
    for maximize, better, worse in ((False, 0.4, 0.6), (True, 0.6, 0.4)):
        stream, clock = io.StringIO(), Clock()
        with show(stream, clock, start=Summary(complete=1, best=best), maximize=maximize) as display:
            display.update(finished(1, worse))
            display.update(finished(2, better))
            display.update(finished(3, float("-inf")))
        assert ["new best" in line for line in stream.getvalue().splitlines()] == [False, True, False]


def test_lines_of_quick_trials_are_gathered() -> None:
    """At 100 trials a second there are two lines a second, none is missing in them, and a new best is named."""
    stream, clock = io.StringIO(), Clock()
    with show(stream, clock, goal=500) as display:
        for number in range(500):
            clock.time += 0.01
            value = 0.1 if number != 300 else 0.05
            state = PRUNED if number % 10 == 9 else COMPLETE
            display.update(finished(number, value if state == COMPLETE else None, state))
    lines = stream.getvalue().splitlines()
    single = [line for line in lines if line.startswith("trial ")]
    gathered = [line for line in lines if line.startswith("trials ")]
    assert len(single) == 9
    assert len(single) + len(gathered) == len(lines) <= 9 + 11
    spans = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in gathered]
    assert spans[0][0] == 9
    assert spans[-1][1] == 499
    assert all(a[1] + 1 == b[0] for a, b in pairwise(spans))
    counts = [re.search(r"(\d+) complete, (\d+) pruned", line) for line in gathered[1:-1]]
    assert all(c and int(c[1]) + int(c[2]) == b - a + 1 for c, (a, b) in zip(counts, spans[1:-1], strict=True))
    assert [line.partition(", new best ")[2] for line in gathered if "new best" in line] == [
        "validation loss 0.05 in trial 300, lr=0.1235 batch_size=32 nesterov=True"
    ]
    assert gathered[1].endswith("pruned, best 0.1")


def test_a_gathered_line_is_not_kept_back() -> None:
    """After half a second any event brings out what was gathered; a failure in it is explained."""
    stream, clock = io.StringIO(), Clock()
    with show(stream, clock) as display:
        for number in range(11):
            display.update(finished(number, 0.1))
        display.update(finished(11, state=FAIL, reason="out of\nmemory"))
        assert len(stream.getvalue().splitlines()) == 9
        clock.time += 0.6
        display.update(EpochDone(12, 0, 5, 1.0))
        assert stream.getvalue().splitlines()[9:] == ["trials 9-11: 2 complete, 1 failed (out of memory), best 0.1"]


def test_control_characters_never_break_a_line() -> None:
    """Line breaks, colors and cursor movements in reasons, names, values and notes are taken out."""
    evil = "a\nb\r\x1b[2J\x1b[31mc\u2028d\x00\u202ee\ud800f"
    assert clean(evil) == "a b c d e f"
    for terminal in (False, True):
        stream, clock = (Terminal() if terminal else io.StringIO()), Clock()
        with show(stream, clock, device=evil) as display:
            display.note(evil)
            display.update(finished(1, state=FAIL, reason=evil, params={evil: evil}))
            clock.time += 1
            display.update(finished(2, 0.5, params={evil: evil, "[bold]x": "[red]y"}))
        text = text_of(stream) if terminal else stream.getvalue()
        assert not re.search(r"[\x00\x1b\u2028\u202e\ud800]|\r(?!\n)", text.replace("\r\n", "\n").replace("\r", ""))
        assert "\x1b[2J" not in stream.getvalue()
        assert "[bold]x=[red]y" in text
        if not terminal:
            assert len(stream.getvalue().splitlines()) == 6


def test_the_table_shows_the_run_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, progress, pace, time left, best with hyperparameters, device, last failure, running trials."""
    monkeypatch.setenv("COLUMNS", "80")
    stream, clock = Terminal(), Clock()
    start = Summary(complete=5, pruned=2, failed=1, running=1)
    many = {f"hyperparameter_{i}": 0.1 * i for i in range(12)}
    with show(stream, clock, start=start, goal=20) as display:
        for number in range(8, 14):
            display.update(Started(number, PARAMS, "w0"))
            clock.time += 1
            if number == 10:
                display.update(finished(number, state=FAIL, reason="loss is nan at epoch 3, " + "because " * 20))
            elif number == 11:
                display.update(finished(number, state=PRUNED))
            elif number < 13:
                display.update(finished(number, 1 / number, params=many))
        display.update(Started(14, PARAMS, "w1"))
        display.update(EpochDone(13, 4, 20, 0.4567891))
        clock.time += 1
        display.update(EpochDone(14, 0, 20, 0.9))
        table = last_table(stream)
    assert re.search(r"study +8 complete, 3 pruned, 2 failed, 3 running\s", table)
    assert re.search(r"this run +3 complete, 1 pruned, 1 failed, 2 running\s", table)
    assert re.search(r"progress +5 of 20 trials, 42.86 trials per minute, about 13.0 s left\s", table)
    assert re.search(r"best +validation loss 0.08333 in trial 12, hyperparameter_0=0 ", table)
    assert re.search(r"device +cpu\s", table)
    assert re.search(r"failed +trial 10: loss is nan at epoch 3, because", table)
    assert re.search(r"trial 13 +epoch 5 of 20, validation loss 0.4568\s", table)
    assert re.search(r"trial 14 +epoch 1 of 20, validation loss 0.9\s", table)
    assert max(map(len, text_of(stream).splitlines())) <= 80


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_the_table_fits_any_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than the terminal, with forty trials running and long names."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "60")
    stream, clock = Terminal(), Clock()
    with show(stream, clock, device="a device with a long name " * 4) as display:
        for number in range(40):
            display.update(Started(number, PARAMS, "w0"))
        clock.time += 1
        display.update(finished(0, 0.5, params={"x" * 50: "y" * 50}))
        assert "and 31 more" in " ".join(last_table(stream).split())
    assert max(map(len, text_of(stream).splitlines())) <= int(columns)


def test_the_table_is_drawn_at_most_four_times_a_second() -> None:
    """10,000 events in a second of the clock draw the table five times at most, and once more at the end."""
    stream, clock = Terminal(), Clock()
    with show(stream, clock) as display:
        display.update(Started(0, PARAMS, "w0"))
        for epoch in range(10_000):
            clock.time += 0.0001
            display.update(EpochDone(0, epoch, 10_000, 0.5))
        drawn = text_of(stream).count("this run")
    assert 4 <= drawn <= 5


def test_progress_never_passes_the_whole() -> None:
    """More ended trials than the goal (other workers, repeated ones) show as all of it, and no time left."""
    stream, clock = Terminal(), Clock()
    with show(stream, clock, goal=3) as display:
        for number in range(7):
            display.update(Started(number, PARAMS, "w0"))
            clock.time += 1
            display.update(finished(number, 0.5))
    assert re.findall(r"(\d+) of 3 trials", text_of(stream))[-1] == "3"
    assert not re.findall(r"([4-9]) of 3 trials", text_of(stream))
    assert "left" not in last_table(stream)


def test_time_left_is_said_only_when_known() -> None:
    """Not before as many trials ended as run side by side, nor without a goal; then from their pace."""
    for goal, known in ((12, True), (None, False)):
        stream, clock = Terminal(), Clock()
        with show(stream, clock, goal=goal) as display:
            for number in range(4):
                display.update(Started(number, PARAMS, f"w{number}"))
            clock.time += 10
            for number in range(3):
                display.update(finished(number, 0.5))
            clock.time += 1
            display.update(EpochDone(3, 0, 5, 0.5))
            assert "left" not in text_of(stream)
            display.update(finished(3, 0.5))
            clock.time += 5
            display.update(Started(4, PARAMS, "w0"))
            table = last_table(stream)
            # Four trials in 11 s, eight to go: 22 s from the last end, 5 s of which have passed.
            assert ("about 17.0 s left" in table) == known
            assert ("left" in table) == known
            assert re.search(r"progress +4 of 12 trials" if known else r"progress +4 trials", table)


def test_no_color_is_obeyed() -> None:
    """With NO_COLOR the table has no color; an empty NO_COLOR, and none, mean color."""
    for environ, colored in (({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        stream, clock = Terminal(), Clock()
        with show(stream, clock, environ={"TERM": "xterm-256color", **environ}) as display:
            display.update(finished(0, 0.5))
        assert bool(re.search(r"\x1b\[[0-9;]*m", stream.getvalue())) == colored
        assert "\x1b[?25h" in stream.getvalue()


def test_a_dumb_terminal_and_a_file_get_plain_lines() -> None:
    """Neither gets a control sequence."""
    for stream, term in ((Terminal(), "dumb"), (io.StringIO(), "xterm")):
        with show(stream, Clock(), environ={"TERM": term}) as display:
            display.update(Notice("resumes the study"))
            display.update(finished(0, 0.5))
        assert "\x1b" not in stream.getvalue()
        assert stream.getvalue().startswith("resumes the study\ntrial 0 complete")


def test_a_note_appears_above_the_table() -> None:
    """A line for the person stays readable while the table is drawn over and over."""
    stream, clock = Terminal(), Clock()
    with show(stream, clock) as display:
        display.note("the stack of 4 lanes was halved")
        clock.time += 1
        display.update(finished(0, 0.5))
    text = text_of(stream)
    assert text.index("the stack of 4 lanes was halved\n") < text.rindex("this run")


def test_several_values_are_shown_side_by_side() -> None:
    """Each with its own name, and none is called best."""
    for stream in (io.StringIO(), Terminal()):
        with show(stream, Clock(), objective="validation loss, wall time") as display:
            display.update(finished(0, values=(0.5, 2.25)))
        text = text_of(stream)
        assert "validation loss 0.5, wall time 2.25" in text
        assert "best" not in text


def test_long_runs_say_how_far_they_are() -> None:
    """Plain lines hold, once a minute, the progress, the pace, the time left and the best."""
    stream, clock = io.StringIO(), Clock()
    with show(stream, clock, goal=4) as display:
        for number in range(3):
            display.update(Started(number, PARAMS, "w0"))
            clock.time += 45
            display.update(finished(number, 0.5 + number, params={"lr": 0.1}))
    assert [line for line in stream.getvalue().splitlines() if not line.startswith("trial ")] == [
        "2 of 4 trials; 1.333 trials per minute, about 1 min 30 s left; validation loss 0.5 in trial 0, lr=0.1"
    ]


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    """Errors of the stream end the showing, not the program."""

    class Gone(Terminal):
        def write(self, text: str) -> int:
            if self.gone:
                raise BrokenPipeError("gone")
            return super().write(text)

        gone = False

    for term in ("dumb", "xterm"):
        stream, clock = Gone(), Clock()
        with show(stream, clock, environ={"TERM": term}) as display:
            display.update(finished(0, 0.5))
            stream.gone = True
            clock.time += 1
            display.update(finished(1, 0.5))
            display.note("a note")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.314, "0.31 s"), (9.996, "10.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (200, "3 min 20 s"),
     (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)  # fmt: skip
def test_durations_read_well(seconds: float, text: str) -> None:
    """Two digits for short times, minutes and hours for long ones, and no 60 seconds."""
    assert duration(seconds) == text


def test_values_are_rounded_readably() -> None:
    """Four significant digits for floats; everything else as it is, on one short line."""
    shown = [readable(v) for v in (0.00012345678, 1234567.0, 3, True, None, "relu", float("nan"), (64, 32))]
    assert shown == ["0.0001235", "1.235e+06", "3", "True", "None", "relu", "nan", "(64, 32)"]
    assert len(readable("x" * 500)) == 40


def test_plain_lines_load_neither_rich_nor_torch() -> None:
    """What is not needed is not imported: a command starts at once."""
    code = (
        "import io, sys; from tuner.display import open_display; from tuner.results import Summary\n"
        "with open_display(io.StringIO(), {}, objective='x', maximize=False, goal=1, device='', start=Summary()):\n"
        "    pass\n"
        "print([name for name in ('rich.live', 'rich.console', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_time_left_grows_while_nothing_ends() -> None:
    """A run that is held up, by a full disk say, does not promise to be done in no time."""
    tally = Tally("loss", False, 10, Summary())
    for number in range(5):
        tally.started(Started(number, {}, "me"), float(number))
        tally.finished(Finished(number, TrialState.COMPLETE, (1.0,), {}, 1.0, 1, "me"), number + 1.0)
    assert tally.seconds_left(5.0) == pytest.approx(5.0)
    assert tally.seconds_left(6.0) == pytest.approx(4.0)
    held_up = tally.seconds_left(105.0)
    assert held_up is not None
    assert held_up > 100
