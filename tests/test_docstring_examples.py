"""Every public name has an example in its docstring, and each example runs.

An example is the indented block after a line `Example:`. That of an error ends with a line that raises it; where no line can, the
docstring says `What to do:`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import textwrap
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
import prefetchshard.testing
from test_public_names import METHODS, PUBLIC

TESTING = {f"testing.{name}" for name, thing in vars(prefetchshard.testing).items() if callable(thing) and not name.startswith("_")}
CHECKPOINT = {"checkpoint.PrefetchshardHandler", "checkpoint.PrefetchshardRestore", "checkpoint.PrefetchshardSave"}
EXPORTING = {"exporting.prometheus.PrometheusCollector", "exporting.scalars.log_scalars"}
GIVEN = {"ps": ps, "np": np, "jax": jax, "Mesh": Mesh, "NamedSharding": NamedSharding, "P": PartitionSpec}
NAMES = [*sorted(PUBLIC | TESTING | EXPORTING), *(pytest.param(name, marks=pytest.mark.ecosystem) for name in sorted(CHECKPOINT))]


def find(name: str) -> Any:
    module, _, name = name.rpartition(".")
    if module == "checkpoint":
        pytest.importorskip("orbax.checkpoint")
    return getattr(importlib.import_module(f"prefetchshard.{module}" if module else "prefetchshard"), name)


def example_of(doc: str) -> str:
    """The code after the line `Example:`, up to the end of the docstring or the next line that is not indented; empty where there is none."""
    _, _, after = inspect.cleandoc(doc).partition("\nExample:\n")
    lines: list[str] = []
    for line in after.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")
@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = find(name)
    doc = thing.__doc__ or ""
    code = example_of(doc)
    is_error = isinstance(thing, type) and issubclass(thing, Exception)
    if is_error and not code:
        assert "What to do:" in doc
        return
    assert code, f"{name} has no example in its docstring"
    assert len(code.splitlines()) <= 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ps, "testing", prefetchshard.testing, raising=False)
    beside = vars(inspect.getmodule(thing)) if name.startswith("checkpoint.") else {}
    with pytest.raises(thing) if is_error else contextlib.nullcontext(), warnings.catch_warnings():
        exec(compile(code, f"<example of {name}>", "exec"), {**beside, **GIVEN, "__name__": "example"})


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in sorted(names)])
def test_example_of_a_method_runs(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has one: most are in the example of the class."""
    code = example_of(vars(getattr(ps, kind))[name].__doc__ or "")
    assert len(code.splitlines()) <= 6
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"<example of {kind}.{name}>", "exec"), {**GIVEN, "__name__": "example"})
