"""The layers of the design, the size budget, and what is not imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tuner"

LAYERS = """
    run compare report best dashboard check __main__
    outcome options
    workers engines mend
    assignment
    search objective figures display prepare
    study tell
    study_file samplers progress health
    spec storage tpe halving
    storage_starts storage_schema owner weights sqlite_copy
    storage_transactions sqlite_file
    storage_rows
    results
    measure
    assemble plan
    stack microbatch widths
    program
    padding
    capture train signature
    rewrite
    listing
    data machine
    device replay
    clock dropout interrupt storage_url
    errors
"""
"""Top to bottom: a module imports only from lines below its own. `__init__` only maps names, and is on no line."""

LEVEL = {name: level for level, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def homes() -> dict[str, str]:
    """Name of the package -> module that it comes from, read from `__init__`."""
    for node in tree_of(PACKAGE / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {name: home.removeprefix("tuner.") for name, home in ast.literal_eval(node.value).items()}
    raise AssertionError("tuner/__init__.py has no _HOMES")


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module of tuner) for each import: at the top, in functions, for type checking, by import_module."""
    public = homes()
    for node in ast.walk(tree):
        dotted: list[str] = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"tuner.{base}".rstrip(".")
            dotted = [f"{base}.{alias.name}" for alias in node.names] if base == "tuner" else [base]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            dotted = [ast.literal_eval(node.args[0])] if node.args and isinstance(node.args[0], ast.Constant) else []
        for name in dotted:
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "tuner" and target and not target.startswith("__version"):
                yield node.lineno, public.get(target, target)


def test_every_module_is_on_a_line_of_the_layers() -> None:
    """A new module takes a place in the layers, or this fails."""
    assert [name for name in MODULES if name not in LEVEL] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_lines_below_its_own(name: str) -> None:
    """Lazily, for type checking or at the top: an import goes down."""
    found = [
        f"tuner/{name}.py:{line} imports tuner.{target}"
        for line, target in imports_of(tree_of(PACKAGE / f"{name}.py"))
        if LEVEL.get(target, -1) <= LEVEL.get(name, -1)
    ]
    assert found == []


def test_every_way_to_import_is_seen() -> None:
    """The rule holds for each way to write an import, so each is found."""
    source = """
import tuner.a
from tuner.b import x
from tuner import c, StudySpec
from .d import y
from . import e
def function():
    import tuner.f as g
    import_module("tuner.h")
if TYPE_CHECKING:
    from tuner.i import z
import torch
from optuna import trial
from tuner import __version__
"""
    found = [target for _, target in imports_of(ast.parse(source))]
    assert sorted(found) == ["a", "b", "c", "d", "e", "f", "h", "i", "spec"]


@pytest.mark.parametrize("name", ["__init__", *MODULES])
def test_a_module_stays_under_300_lines_and_a_function_under_50(name: str) -> None:
    """Past that, two ideas share a room."""
    path = PACKAGE / f"{name}.py"
    lines = len(path.read_text().splitlines())
    assert lines <= 300, f"tuner/{name}.py has {lines} lines"
    long = {
        node.name: length
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 50
    }
    assert long == {}


def loaded_after(code: str) -> set[str]:
    """The modules that a new process has loaded once it has run `code`."""
    code += "\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def test_import_tuner_loads_no_large_library() -> None:
    """`import tuner` is quick: torch, Optuna and SQLAlchemy wait until something needs them."""
    loaded = loaded_after("import tuner")
    assert "tuner" in loaded
    assert loaded & {"torch", "optuna", "sqlalchemy", "sklearn", "plotly", "rich"} == set()


@pytest.mark.parametrize("command", ["run", "report", "dashboard", "check"])
def test_help_never_loads_torch(command: str) -> None:
    """`--help` answers without loading torch, and exits with 0."""
    loaded = loaded_after(f"""
import runpy, sys
sys.argv = ["tuner.{command}", "--help"]
try:
    runpy.run_module("tuner.{command}", run_name="__main__", alter_sys=True)
    raise AssertionError("--help did not exit")
except SystemExit as exit:
    assert not exit.code, exit.code
""")
    assert "argparse" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("command", ["report", "dashboard", "check"])
def test_reading_commands_load_without_torch(command: str) -> None:
    """`report`, `dashboard` and `check` read a storage: importing them loads no torch either."""
    assert "torch" not in loaded_after(f"import tuner.{command}")
