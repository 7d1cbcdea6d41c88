"""Finds the function that a user names on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from prefetchshard import ConfigError

FORM = "MODULE:FACTORY, as in my_data:batches or my_data.py:batches"


def find_factory(text: str) -> Callable[[], Any]:
    """The function that `MODULE:FACTORY` names; the current folder is looked in first, as `python -m` does.

    Args:
        text: a module's dotted name, or the path of a file that ends with `.py`, and a dotted name in it.

    Raises:
        ConfigError: there is none; says what is not there.
        Exception: whatever the module raises when it is imported.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{text!r}: {FORM}")
    module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_name(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{text}: {module_name} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{text}: {name} is no function ({type(found).__name__}); write one that returns it")
    return found


def _from_name(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"no module named {error.name!r}, neither here nor installed") from None
        raise  # one that the user's module wants


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    _look_in(Path.cwd())
    _look_in(path.resolve().parent)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if _is_of(known, path):
            return known
        raise ConfigError(f"{path}: another module is named {name!r} already; rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # worker processes find what they are sent by its module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_of(module: ModuleType, path: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve() == path.resolve()


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
