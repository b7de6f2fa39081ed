"""What a study found, as tables on stdout: the best trials, the failures, and where the time went.

`tuner.figures` turns a study into one value; text, JSON and CSV are ways to write it. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import NoTrialCompletedError, StorageError, TunerError, UsageError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study

    from tuner.figures import Report, Row


def as_json(report: Report) -> str:
    """The report as one strict JSON document: what is not finite becomes the text ``nan``, ``inf`` or ``-inf``."""
    return json.dumps(_strict(asdict(report)), indent=2, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_text(report: Report) -> Iterator[str]:
    """The report as lines for a person, of whatever width they need."""
    from tuner.progress import clean, duration, named, readable

    goals = ", ".join(f"{m} ({d})" for m, d in zip(report.metrics, report.directions, strict=True))
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items())
    lines = [("study", clean(report.study, 600)), ("storage", report.storage), ("value", clean(goals, 2000))]
    lines.append(("trials", counts if any(report.counts.values()) else "none yet"))
    if report.span_seconds is not None and report.trials_per_minute is not None:
        pace = f"{readable(report.trials_per_minute)} trials per minute over {duration(report.span_seconds)}"
        lines.append(("pace", f"{pace}, in {duration(report.busy_seconds)} of which trials ran"))
    if report.best is not None:
        lines.append(("best", f"trial {report.best.number}, {named(', '.join(report.metrics), report.best.values)}"))
    yield from _aligned(lines)
    if report.best is not None:
        # The storage gives attributes in no certain order.
        attributes = dict(sorted(report.best.attributes.items()))
        for title, items in (("hyperparameters", report.best.params), ("attributes", attributes)):
            if items:
                yield from ("", f"{title} of the best trial")
                yield from _aligned([("  " + clean(k, 600), _full(v)) for k, v in items.items()])
    if report.top:
        yield from ("", f"best {len(report.top)} trials" if len(report.top) > 1 else "best trial")
        yield from _trial_table(report.metrics, report.top)
    if report.front:
        yield from ("", f"Pareto front: {len(report.front)} trials that no other beats in every value")
        yield from _trial_table(report.metrics, report.front)
    if report.timed_trials:
        yield from ("", f"where the time of {report.timed_trials} trials went")
        yield from _time_table(report)
    if report.failures:
        yield from ("", "failures by reason")
        yield from _aligned([("  " + str(count), clean(reason, 2000)) for reason, count in report.failures.items()])


def _full(value: object) -> str:
    from tuner.progress import clean

    return f"{value:.6g}" if isinstance(value, float) else clean(value, 2000)


def _trial_table(metrics: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    from tuner.progress import clean, readable

    params = list(dict.fromkeys(name for row in rows for name in row.params))
    yield from _aligned(
        [("  trial", *(clean(m, 600) for m in metrics), "seconds", *(clean(p, 600) for p in params))]
        + [
            (
                f"  {row.number}",
                *map(readable, row.values),
                "" if row.seconds is None else readable(row.seconds),
                *(readable(row.params[name], 600) if name in row.params else "-" for name in params),
            )
            for row in rows
        ]
    )


def _time_table(report: Report) -> Iterator[str]:
    total = report.wall_time
    other = total - math.fsum(report.parts.values())
    parts = [(name.removesuffix("_seconds"), seconds) for name, seconds in report.parts.items()]
    rows = [*parts, ("other", other), ("wall time", total)]
    if report.device_seconds:
        rows.append(("device", report.device_seconds))
    shares = [f"{100 * seconds / total:.1f} %" if total else "-" for _, seconds in rows]
    yield from _aligned(
        [("  part", "seconds", "share", "per trial")]
        + [
            (f"  {name}", f"{seconds:.3f}", share, f"{seconds / report.timed_trials:.4f}")
            for (name, seconds), share in zip(rows, shares, strict=True)
        ]
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines with the columns of `rows` beside each other, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def choose(storage: BaseStorage, url: str, name: str | None) -> Study:
    """The study `name`, or the only one. Raises UsageError that lists what there is."""
    import optuna

    names = sorted(optuna.get_all_study_names(storage))
    if not names:
        raise StorageError(f"wanted a study in {url}, found none; start one with: python -m tuner.run")
    if name is None and len(names) > 1:
        counts = [(f"  {s.study_name}", f"{s.n_trials} trials") for s in optuna.get_all_study_summaries(storage, False)]
        print("studies in this storage:", *_aligned(sorted(counts)), sep="\n", file=sys.stderr)
        raise UsageError(f"wanted one study, found {len(names)} in {url}; choose one with --study-name")
    if name is not None and name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise UsageError(f"wanted the study {name!r}, found none of that name in {url}; did you mean {near!r}?")
    return optuna.load_study(study_name=name or names[0], storage=storage)


def report(args: argparse.Namespace) -> int:
    """Print what was asked for; the exit code: 3 if no trial is complete."""
    from tuner.figures import measure, write_csv
    from tuner.storage import masked, open_storage, resolve_url

    url = resolve_url(args.storage, os.environ, Path.cwd())
    study = choose(open_storage(url, create=False), masked(url), args.study_name)
    measured = measure(study, masked(url), args.top)
    if args.csv is not None:
        try:
            with args.csv.open("w", newline="", encoding="utf-8") as file:
                write_csv(study, file)
        except OSError as error:
            raise UsageError(f"wanted to write {args.csv}, found: {error.strerror}; name another file") from None
        print(f"wrote {args.csv}", file=sys.stderr)
    print(as_json(measured) if args.json else "\n".join(as_text(measured)), flush=True)
    return 0 if measured.counts["complete"] else NoTrialCompletedError.exit_code


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tuner.report",
        description="Show what a study found: its best trials, its failures, and where the time went.",
        epilog="Exit codes: 0 done, 2 wrong usage, 3 no trial is complete.",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="SQLite file or storage URL (default: OPTUNA_STORAGE, else tuner.db in this directory)",
    )
    parser.add_argument("--study-name", metavar="NAME", help="which study (default: the only one in the storage)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write all trials to FILE")
    parser.add_argument("--top", metavar="N", type=_count, default=10, help="best trials to show (default: 10)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = parse(argv)
    try:
        return report(args)
    except TunerError as error:
        if args.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has seen enough (`| head`). What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
