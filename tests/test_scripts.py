"""The scripts, the package that is built from the tree, and the README's commands: what a stranger meets first."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHELL = ["scripts/tune", "scripts/test", "scripts/lib.sh", ".ci/run"]

# An in-tree build backend: pip installs the small project below without a download.
BACKEND = """
import zipfile
from pathlib import Path

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(directory, config_settings=None, metadata_directory=None):
    name, info = "tuner-0.1.0-py3-none-any.whl", "tuner-0.1.0.dist-info"
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        wheel.writestr("tuner.pth", str(Path.cwd()))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tuner\\nVersion: 0.1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
RUN = 'import os, sys\nprint(os.getcwd())\nprint(sys.prefix)\nprint("|".join(sys.argv[1:]))\nsys.exit(3)\n'


def run(words: list[str], timeout: float = 60, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]


@functools.cache
def help_of(*words: str) -> str:
    """What a command of ours prints for `--help`."""
    done = run([sys.executable, *words, "--help"], cwd=ROOT)
    assert done.returncode == 0, f"{shlex.join(words)} --help: {done.stderr}"
    return done.stdout


# The scripts as files


@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_is_valid_and_stops_at_the_first_error(name: str) -> None:
    """bash can parse it; what is run directly is executable, and does not go on after a failure."""
    path = ROOT / name
    assert run(["bash", "-n", str(path)]).stderr == ""
    if path.suffix == "":
        assert os.access(path, os.X_OK)
        text = path.read_text()
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "set -euo pipefail" in text


@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_needs_no_newer_bash_than_macos_has(name: str) -> None:
    """bash 3.2 lacks these, and macOS has no flock, realpath, timeout or sha256sum command."""
    text = re.sub(r"(?m)^\s*#.*|'[^']*'", "", (ROOT / name).read_text())
    newer = (
        r"\b(mapfile|readarray|declare -A|local -n|realpath|readlink -f|sha256sum|timeout)\b|^\s*flock\b|\$\{\w+[,^]"
    )
    assert re.findall(newer, text, re.MULTILINE) == []


# The environment that scripts/tune makes


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with our scripts and without our dependencies, in a directory with a space in its name."""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("TUNER_VENV", raising=False)
    root = tmp_path / "a project"
    (root / "scripts").mkdir(parents=True)
    (root / "tuner").mkdir()
    for name in ("tune", "lib.sh"):
        shutil.copy2(ROOT / "scripts" / name, root / "scripts" / name)
    (root / "scripts" / "constraints.txt").write_text("")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "tuner" / "__init__.py").write_text("")
    (root / "tuner" / "run.py").write_text(RUN)
    return root


def test_tune_makes_its_environment_once_and_anew_after_a_kill(project: Path, cwd: Path) -> None:
    """A call that was killed leaves nothing that the next one trusts; later ones start at once; stdout is the run's."""
    words = [str(project / "scripts" / "tune"), "--n-trials", "5", "two words", ""]
    venv = project / ".venv"
    wanted = f"{cwd}\n{venv}\n--n-trials|5|two words|\n"

    killed = subprocess.Popen(words, cwd=cwd, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (venv / "bin" / "python").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(timeout=10)
    (venv / "half").touch()

    first = run(words, cwd=cwd)
    assert (first.returncode, first.stdout) == (3, wanted), first.stderr
    assert "making the environment" in first.stderr
    assert not (venv / "half").exists()

    started = time.monotonic()
    second = run(words, cwd=cwd)
    assert (second.returncode, second.stdout, second.stderr) == (3, wanted, "")
    assert time.monotonic() - started < 5

    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    (venv / "kept").touch()
    third = run(words, cwd=cwd)
    assert (third.returncode, third.stdout) == (3, wanted), third.stderr
    assert "making the environment" in third.stderr
    assert (venv / "kept").exists(), "a finished environment is brought up to date, not thrown away"


def test_two_first_calls_at_once_share_one_environment(project: Path, cwd: Path) -> None:
    """The second waits for the first, says so, and installs nothing."""
    words = [str(project / "scripts" / "tune"), "x"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(words, cwd=cwd, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    ends = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [3, 3], ends
    errors = "".join(stderr for _, stderr in ends)
    assert errors.count("making the environment") == 1, errors
    assert errors.count("waiting for another call") == 1, errors


def test_an_environment_that_tuner_did_not_make_is_refused_and_kept(project: Path, cwd: Path) -> None:
    """Somebody's own .venv is not thrown away."""
    (project / ".venv").mkdir()
    (project / ".venv" / "mine").write_text("precious")
    done = run([str(project / "scripts" / "tune")], cwd=cwd)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "found something else there; remove it, or set TUNER_VENV" in done.stderr
    assert [path.name for path in (project / ".venv").iterdir()] == ["mine"]


def test_without_a_suitable_python_tune_says_which_it_wants(project: Path, cwd: Path) -> None:
    """Wanted, found, what to do; nothing is made."""
    tools = cwd / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "basename", "cat", "cmp", "mkdir", "ls"):
        (tools / name).symlink_to(shutil.which(name) or "")
    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\ncase "$2" in "") exit 0;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = run([str(project / "scripts" / "tune")], cwd=cwd, env={"PATH": str(tools)})
    assert done.returncode == 1
    assert "wanted Python 3.11, 3.12 or 3.13" in done.stderr
    assert "found Python 3.9.2" in done.stderr
    assert not (project / ".venv").exists()


# The package


def test_each_dependency_has_an_exact_version_for_the_scripts() -> None:
    """An open range would let CI change under us, and fetch gigabytes."""
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    pinned = {re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in wanted}
    assert len(names) > 10
    assert names - pinned == set()


def test_an_installed_tuner_has_its_study_files(tmp_path: Path) -> None:
    """The wheel finds every study by name without the checkout."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = run(build, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("tuner-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    studies = sorted(path.stem for path in (ROOT / "studies").glob("[!_]*.py"))
    assert {"digits_mlp", "digits_cnn", "diabetes_mlp"} <= set(studies)

    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    listed = run([sys.executable, "-m", "tuner.run", "--list-studies"], cwd=tmp_path, env=environ)
    assert listed.returncode == 0, listed.stderr
    assert [name for name in studies if name not in listed.stdout] == []


# The plain script and its clock


def test_the_plain_script_prints_its_best_value_and_knows_nothing_of_tuner(cwd: Path) -> None:
    """Two trials of the script that the tuner is measured against; its storage is Optuna's own."""
    script = ROOT / "scripts" / "plain_optuna.py"
    assert "import tuner" not in script.read_text()
    assert "from tuner" not in script.read_text()
    done = run([sys.executable, str(script), "--n-trials", "2", "--storage", f"sqlite:///{cwd}/plain.db"])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"best validation loss \d\.\d+ \(trial [01]\), \d+\.\d seconds\n", done.stdout)
    assert (cwd / "plain.db").exists()


def test_the_comparison_with_the_plain_script_prints_both_and_the_ratio() -> None:
    """One trial each: what is timed is there, and the ratio is that of the two times."""
    words = [sys.executable, str(ROOT / "scripts" / "bench_plain.py"), "--n-trials", "1", "--repeats", "1", "--json"]
    done = run(words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (tuner,), (plain,) = document["tuner"], document["plain"]
    assert document["ratio"]["median"] == pytest.approx(plain["seconds"] / tuner["seconds"])
    assert 0 < tuner["best"] < 3
    assert 0 < plain["best"] < 3


# Skips


def test_in_ci_only_gpu_tests_may_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is skipped for want of something else fails there, and is skipped on a person's machine."""
    shutil.copy2(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    (tmp_path / "test_gpu.py").write_text("import pytest\n@pytest.mark.cuda\ndef test_a(): pytest.skip('no GPU')\n")
    (tmp_path / "test_body.py").write_text("import pytest\ndef test_b(): pytest.skip('no server')\n")
    (tmp_path / "test_file.py").write_text("import pytest\npytest.skip('no browser', allow_module_level=True)\n")
    (tmp_path / "test_known.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_c(): assert False\n")

    def outcome(ci: str) -> tuple[str, str]:
        monkeypatch.setenv("CI", ci)
        flags = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        output = run([sys.executable, "-m", "pytest", *flags], cwd=tmp_path).stdout
        return output.splitlines()[-1].rpartition(" in ")[0], output

    assert outcome("")[0] == "3 skipped, 1 xfailed"
    counts, output = outcome("true")
    assert counts == "1 failed, 1 skipped, 1 xfailed, 1 error"
    assert re.search(r"test_body.* may not be skipped in CI: .*no server", output)
    assert re.search(r"test_file.* may not be skipped in CI: .*no browser", output)


# The README


OTHERS = {"cd", "git", "pip", "source", ".", "optuna", "optuna-dashboard", "python", "export"}
"""Programs of other people that the README may use, besides ours."""


def shell_lines(markdown: str) -> Iterator[str]:
    """The commands in a document's fenced blocks: all lines of shell blocks, and the `$ ` lines of console blocks."""
    for _, language, body in re.findall(r"(?ms)^ {0,3}(```+|~~~+)[ ]*(\w*)[^\n]*\n(.*?)^ {0,3}\1", markdown):
        lines = body.replace("\\\n", " ").splitlines()
        if language in ("sh", "bash", "shell"):
            yield from (line.strip().removeprefix("$ ") for line in lines)
        else:
            yield from (line.strip()[2:] for line in lines if line.strip().startswith("$ "))


def commands(markdown: str) -> list[list[str]]:
    """Each single command as its words, without assignments in front, redirections and comments."""
    found = []
    for line in shell_lines(markdown):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()<>"):
                if words:
                    found.append(words)
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)
    return found


def problem(words: list[str]) -> str | None:
    """Why a command of the README would not work, or None."""
    program, rest = words[0].removeprefix("./"), words[1:]
    if re.fullmatch(r"python3?(\.\d+)?|\S+/python", program):
        program = "python"
    if program == "python" and rest[:1] == ["-m"] and rest[1].startswith("tuner"):
        known = help_of("-m", rest[1])
        rest = rest[2:]
    elif program == "python" and rest and rest[0].startswith("scripts/"):
        if not (ROOT / rest[0]).exists():
            return "no such script"
        known = help_of(rest[0])
        rest = rest[1:]
    elif program == "scripts/tune":
        known = help_of("-m", "tuner.run")
    elif program in ("scripts/test", ".ci/run"):
        return None if os.access(ROOT / program, os.X_OK) else "no such script"
    else:
        return None if program in OTHERS else "not a program that the README may use"
    flags = [word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
    unknown = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known)]
    return f"unknown {', '.join(unknown)}" if unknown else None


def test_commands_are_found_in_every_kind_of_block() -> None:
    """What the next test checks is not silently nothing."""
    markdown = """
```bash
# a comment
A=1 scripts/tune --n-trials 50 \\
    --study 'my study.py'   # why
cd x && python -m tuner.run --json > out.json
```
```console
$ python -m tuner.run --bad-flag
Best value
```
```python
import tuner
```
"""
    found = commands(markdown)
    assert found == [
        ["scripts/tune", "--n-trials", "50", "--study", "my study.py"],
        ["cd", "x"],
        ["python", "-m", "tuner.run", "--json"],
        ["out.json"],
        ["python", "-m", "tuner.run", "--bad-flag"],
    ]


def test_every_command_and_flag_of_the_readme_exists() -> None:
    """The scripts are there, the modules answer --help, and each flag is in that answer."""
    found = commands((ROOT / "README.md").read_text())
    assert any(words[0].endswith("scripts/tune") for words in found)
    assert any(words[0].endswith("scripts/test") for words in found)
    assert any("tuner.run" in words for words in found)
    wrong = {shlex.join(words): why for words in found if (why := problem(words)) is not None}
    assert wrong == {}
    assert problem(["python", "-m", "tuner.run", "--no-such-flag"]) == "unknown --no-such-flag"
