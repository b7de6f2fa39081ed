"""Find and import a study file, and say what is wrong with it in one line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tuner.errors import SpecError
from tuner.spec import LoadedSpec, StudySpec, one_line


def load_spec(source: str) -> LoadedSpec:
    """The spec that `source` names: a study in ``studies/``, a path to a file, or ``package.module:attribute``.

    Raises `SpecError`: one line that names the file, what was wanted and what was found.
    """
    path = _path_of(source)
    if path is not None:
        module, origin, attribute = _load_file(path), str(path), "spec"
        source = str(path.resolve())
    else:
        name, _, attribute = source.partition(":")
        module, origin = _load_module(name), source
        attribute = attribute or "spec"
    if not hasattr(module, attribute):
        raise SpecError(f"{origin}: wanted a variable {attribute!r} that is a tuner.StudySpec; there is none")
    spec = getattr(module, attribute)
    if not isinstance(spec, StudySpec):
        raise SpecError(f"{origin}: {attribute!r} must be a tuner.StudySpec; found {type(spec).__name__}")
    return LoadedSpec(spec, source, origin, spec.description or inspect.cleandoc(module.__doc__ or ""))


def list_specs() -> list[tuple[str, str]]:
    """(name, first line of the docstring) of each study in ``studies/``; nothing is imported."""
    found = []
    for path in sorted(p for folder in _folders() for p in folder.glob("*.py") if not p.name.startswith("_")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found.append((path.stem, text.partition("\n")[0]))
    return found


def _folders() -> list[Path]:
    package = Path(__file__).parent
    return [folder for folder in (package / "studies", package.parent / "studies") if folder.is_dir()]


def _path_of(source: str) -> Path | None:
    name = source.replace("-", "_")
    for folder in _folders():
        if name.isidentifier() and (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    if source.endswith(".py") or "/" in source or "\\" in source:
        path = Path(source).expanduser()
        if not path.is_file():
            raise SpecError(f"--study {source}: there is no such file")
        return path
    if ":" in source:
        return None
    known = ", ".join(name for name, _ in list_specs())
    raise SpecError(f"--study {source}: wanted one of {known}, a path to a .py file, or package.module:attribute")


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"tuner_study_{path.stem}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    # Its neighbours can be imported, as when the file is run as a script; dataclasses and pickles look the module up.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{path}: does not import: {_location(error, path)}{one_line(error)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise SpecError(f"--study {name}: does not import: {one_line(error)}") from error


def _location(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"line {lines[-1]}: " if lines else ""
