"""``python -m tuner`` says which commands there are."""

import sys

COMMANDS = {
    "tuner.run": "tune: python -m tuner.run --n-trials 50",
    "tuner.dashboard": "browse the studies of a storage in optuna-dashboard",
    "tuner.report": "tables of a study: best trials, failures, where the time went",
    "tuner.check": "what this machine can do, whether a storage is healthy, how to mend and copy it",
}


def main() -> int:
    """Print the commands."""
    print("tuner tunes the hyperparameters of PyTorch models with Optuna. Its commands, each with --help:\n")
    for name, text in COMMANDS.items():
        print(f"  python -m {name:16} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
