"""Everything that tuner itself raises, as one tree; each class knows the exit code of a command that ends with it.

The message is one line: what was wanted, what was found, what to do.
"""


class TunerError(Exception):
    """Something that tuner can explain."""

    exit_code = 1


class UsageError(TunerError):
    """What was asked for cannot be done as it was asked: nothing has been started, nothing is left behind."""

    exit_code = 2


class SpecError(UsageError):
    """A mistake in a study file. The message names the file."""


class DeviceError(UsageError):
    """The device that was asked for is not there, or does not work."""


class StorageError(UsageError):
    """The storage cannot be opened or used."""


class StorageLostError(TunerError):
    """The storage's file was deleted or replaced while it was in use: what is written goes nowhere."""


class StudyMismatchError(UsageError):
    """The stored study and the study file disagree on the direction, the search space or the data."""


class NoTrialCompletedError(TunerError):
    """The run ended, and no trial of the study is complete."""

    exit_code = 3


class TooManyFailuresError(TunerError):
    """Trials failed one after the other; going on would waste the night."""


class BudgetSpentError(TunerError):
    """No further trial may start: the study holds, or is about to hold, as many as were asked for."""


class TrialLostError(TunerError):
    """The trial was ended by somebody else while it was being trained here."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an ``Exception``: no handler in a user's model may swallow it."""

    def __init__(self, signal_number: int, meaning: str = "") -> None:
        super().__init__(meaning or f"signal {signal_number}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
