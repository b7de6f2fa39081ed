"""What this machine can do, whether a storage is healthy, and how to mend and to copy it.

`tuner.machine` and `tuner.health` find out; `tuner.mend` and `tuner.sqlite_copy` change something, when they are asked
to. Nothing here loads torch before the arguments are known, and with ``--storage-only`` nothing does at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import Interrupted, TunerError, UsageError
from tuner.interrupt import Interrupt

if TYPE_CHECKING:
    from tuner.health import Health
    from tuner.machine import Machine
    from tuner.sqlite_file import Finding


def as_document(machine: Machine | None, health: Health | None, mended: Sequence[str], backup: Any) -> dict[str, Any]:
    """Everything that was found, as one JSON document."""
    from tuner.storage import masked

    storage: dict[str, Any] | None = None
    if health is not None:
        storage = {**asdict(health), "url": masked(health.url), "healthy": not health.wrong, "mended": list(mended)}
    return {"machine": None if machine is None else asdict(machine), "storage": storage, "backup": backup}


def machine_lines(machine: Machine) -> Iterator[str]:
    """The machine, for a person."""
    from tuner.progress import clean
    from tuner.sqlite_file import size_text

    yield from (f"{name:10} {version}" for name, version in machine.versions.items())
    yield f"{'system':10} {machine.system}"
    yield f"{'cpu':10} {machine.cores} core{'s' * (machine.cores > 1)} usable, {machine.processor}"
    for each in machine.accelerators:
        memory = f", {size_text(each.memory)}" if each.memory is not None else ""
        free = f", {size_text(each.free)} free" if each.free is not None else ""
        yield f"{each.name:10} {each.description}{memory}{free}"
    yield f"{'disk':10} {size_text(machine.free_disk)} free at {clean(machine.folder, 2000)}"
    yield f"{'runs use':10} {machine.chosen} ({machine.why})"


def health_lines(health: Health, mended: Sequence[str]) -> Iterator[str]:
    """A storage, for a person: what it is, its studies, what was mended, what is wrong with it; whether, in a line."""
    from tuner.progress import clean
    from tuner.sqlite_file import size_text
    from tuner.storage import masked

    yield f"{'storage':10} {clean(masked(health.url), 2000)}"
    if health.file is not None:
        file = health.file
        log = f", write-ahead log {size_text(file.log_bytes)}" if file.log_bytes else ""
        yield f"{'file':10} {size_text(file.bytes)}{log}; {size_text(file.free_bytes)} free on its disk"
        yield f"{'journal':10} {file.journal}"
        if file.sound:
            yield f"{'content':10} sound ({file.check})"
    if health.server:
        yield f"{'server':10} PostgreSQL {clean(health.server)}"
    if health.schema:
        yield f"{'schema':10} {clean(health.schema)}"
    for study in health.studies:
        yield f"{'study':10} {clean(study.name, 600)}: {_listed(study.counts)}"
    yield from (f"{'mended':10} {clean(line, 2000)}" for line in mended)
    for wrong in (False, True):
        yield from (_finding_line(finding) for finding in health.findings if finding.wrong == wrong)
    count = len(health.wrong)
    mends = sum(finding.mendable for finding in health.wrong)
    again = f"; --repair mends {mends} of them" if mends and not mended else ""
    verdict = f"{count} thing{'s are' if count > 1 else ' is'} wrong{again}" if count else "healthy"
    yield f"{'verdict':10} {verdict}"


def _finding_line(finding: Finding) -> str:
    from tuner.progress import clean

    answer = "--repair mends it" if finding.mendable else ""
    told = "; ".join(part for part in (finding.text, answer, finding.answer) if part)
    return f"{'wrong' if finding.wrong else 'note':10} {clean(told, 4000)}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials"


def back_up(url: str, target: Path, *, overwrite: bool, salvage: bool) -> dict[str, Any]:
    """Copy the storage to `target`, or what can be read of it; what is in the copy. Raises TunerError."""
    from tuner.sqlite_copy import copy_database, salvage_database
    from tuner.storage import masked, sqlite_path

    source = sqlite_path(url)
    if source is None:
        server = masked(url).replace("postgresql+psycopg://", "postgresql://")
        raise UsageError(
            "wanted a SQLite file to copy, found a PostgreSQL database; its own tool copies it: pg_dump --format=custom"
            f" --file='{target}' '{server}'"
        )
    if not os.path.isfile(source):
        raise TunerError(f"wanted a storage to copy at {source}, found no such file; name another")
    path = Path.cwd() / target
    if salvage:
        counts, lost = salvage_database(source, path)
        return {"file": str(path), "bytes": path.stat().st_size, "studies": counts, "incomplete": lost}

    def tell(done: int, pages: int) -> None:
        print(f"copied {100 * done // pages} % of {source}", file=sys.stderr)

    counts = copy_database(source, path, overwrite=overwrite, progress=tell)
    return {"file": str(path), "bytes": path.stat().st_size, "studies": counts, "incomplete": []}


def backup_lines(backup: Mapping[str, Any]) -> Iterator[str]:
    """A copy, for a person."""
    from tuner.progress import clean
    from tuner.sqlite_file import size_text

    yield f"{'copy':10} {backup['file']}: {size_text(backup['bytes'])}, sound (quick_check)"
    for name, counts in backup["studies"].items():
        yield f"{'in it':10} {clean(name, 600)}: {_listed(counts)}"
    if backup["incomplete"]:
        yield f"{'lost':10} rows of {clean(', '.join(backup['incomplete']), 2000)} could not be read"
        yield f"{'next':10} python -m tuner.check {shlex.quote(backup['file'])} --repair"


def check(args: argparse.Namespace) -> int:
    """Do what was asked for, and print it; the exit code."""
    from tuner.storage import masked, resolve_url, sqlite_path

    url = resolve_url(args.storage, os.environ, Path.cwd())
    target = args.backup or args.salvage
    machine = None
    if not args.storage_only and target is None:
        from tuner.machine import look_around

        path = sqlite_path(url)
        machine = look_around(path.parent if path is not None and os.path.isdir(path.parent) else Path.cwd())
    backup = None
    if target is not None:
        backup = back_up(url, target, overwrite=args.overwrite, salvage=args.backup is None)
    health: Health | None = None
    mended: list[str] = []
    if target is None or args.repair:
        from tuner.health import inspect
        from tuner.mend import mend

        print(f"checking {masked(url)}", file=sys.stderr)
        health = inspect(url, full=args.full or args.repair)
        if args.repair:
            mended = mend(health)
            health = inspect(url, full=True) if mended else health
    if args.json:
        print(json.dumps(as_document(machine, health, mended, backup), indent=2), flush=True)
    else:
        parts = [
            machine_lines(machine) if machine is not None else (),
            backup_lines(backup) if backup is not None else (),
            health_lines(health, mended) if health is not None else (),
        ]
        print("\n\n".join(text for text in map("\n".join, parts) if text), flush=True)
    return 1 if (health is not None and health.wrong) or (backup is not None and backup["incomplete"]) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tuner.check",
        description="Say what this machine can do and whether a storage is healthy; mend it, or copy it.",
        epilog="Exit codes: 0 healthy, or all was mended; 1 something is wrong; 2 wrong usage.",
    )
    parser.add_argument(
        "storage",
        metavar="STORAGE",
        nargs="?",
        help="SQLite file or storage URL (default: OPTUNA_STORAGE, else tuner.db in this directory)",
    )
    parser.add_argument("--storage", metavar="URL", dest="named", help="the same, as the other commands take it")
    parser.add_argument("--storage-only", action="store_true", help="leave out the machine: quick, loads no torch")
    parser.add_argument("--full", action="store_true", help="compare every index of a SQLite file with its table")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="mend what can be mended (after a --full check): end trials whose process on this host is gone, delete"
        " rows that belong to nothing, switch to a write-ahead log, write back a large one, make damaged indexes anew",
    )
    parser.add_argument(
        "--backup",
        metavar="FILE",
        type=Path,
        help="copy a SQLite storage to FILE, also while others write to it; with --repair before anything is mended",
    )
    parser.add_argument(
        "--salvage",
        metavar="FILE",
        type=Path,
        help="copy what can be read of a damaged SQLite file to a new FILE",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)
    if args.storage is not None and args.named is not None:
        parser.error("name one storage, with or without --storage")
    args.storage = args.storage or args.named
    if args.overwrite and args.backup is None:
        parser.error("--overwrite is for --backup FILE")
    if args.salvage is not None and (args.backup is not None or args.repair):
        parser.error("--salvage FILE goes alone: mend the copy afterwards")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = parse(argv)
    interrupt = Interrupt()
    try:
        with interrupt.listening(), interrupt.interruptible():
            return check(args)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except TunerError as error:
        if args.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read has seen enough (`| head`). What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
