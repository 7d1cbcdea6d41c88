"""The command line: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import sys

import pytest

import prefetchshard as ps
from prefetchshard.app import cli
from prefetchshard.base.errors import ConfigError
from support import run_command


def test_module_shows_the_version() -> None:
    done = run_command([sys.executable, "-m", "prefetchshard", "--version"])
    assert (done.returncode, done.stdout.strip()) == (0, f"prefetchshard {ps.__version__}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["demo", "--mesh", "data"], "write axes with their sizes"),
        (["demo", "--mesh", "data=4,data=2"], "each axis once"),
        (["demo", "--epochs", "0"], "at least 1"),
        (["demo", "--batch-size", "many"], "not a whole number"),
        (["demo", "--backend", "trio"], "give --async too"),
        (["demo", "--async", "--backend", "curio"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_settings_that_cannot_work_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo = pytest.importorskip("prefetchshard.app.demo")

    def refuse(options: object) -> int:
        raise ConfigError("batch_size=63 does not divide")

    monkeypatch.setattr(demo, "run", refuse)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "prefetchshard: error: batch_size=63 does not divide\n"


@pytest.mark.parametrize(("module", "package"), [("optax", "optax"), ("rich.console", "rich"), ("sklearn.datasets", "scikit-learn")])
def test_a_missing_extra_is_named(module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from prefetchshard import app

    monkeypatch.delitem(sys.modules, "prefetchshard.app.demo", raising=False)
    monkeypatch.delattr(app, "demo", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert f"needs the package {package}" in error
    assert "pip install 'prefetchshard[demo]'" in error


class _Missing:
    """A finder that finds one module to be not there."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
