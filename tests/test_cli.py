"""The command line: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
        (["demo", "--epochs", "9" * 5000], "at most 2,147,483,647"),
        (["demo", "--seed", "2147483648"], "at most 2,147,483,647"),
        (["demo", "--checkpoint", ""], "it is empty"),
        (["demo", "--checkpoint-every", "3"], "give --checkpoint FOLDER too"),
        (["demo", "--mesh", f"data={'9' * 5000}"], "--mesh"),
        (["demo", "--backend", "trio"], "give --async too"),
        (["demo", "--async", "--backend", "curio"], "invalid choice"),
        (["doctor", "--yaml"], "unrecognized arguments: --yaml"),
        (["doctor", "here"], "unrecognized arguments: here"),
        (["bench"], "MODULE:FACTORY"),
        (["bench", "a:b", "--sharding", "data,data"], "each axis once"),
        (["bench", "a:b", "--sharding", "data,"], "write names of axes or None"),
        (["bench", "a:b", "--batch-size", "0"], "at least 1"),
        (["bench", "a:b", "--workers", "many"], "not a whole number"),
        (["bench", "a:b", "--workers", "threads:4"], "not a whole number"),
        (["bench", "a:b", "--workers", "processes:0"], "at least 1"),
        (["bench", "a:b", "--step-ms", "-1"], "at least 0"),
        (["bench", "a:b", "--seconds", "0"], "more than 0"),
        (["bench", "a:b", "--report", "."], "not the name of a file"),
        (["bench", "a:b", "--report", ""], "not the name of a file"),
        (["bench", "a:b", "--report", "no_such_folder/out.html"], "there is no folder no_such_folder"),
        (["bench", "a:b", "--report", 300 * "a"], "File name too long"),
        (["bench", "a:b", "--seconds", "nan"], "not a number"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_what_bench_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefetchshard.app import bench

    told: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda options: told.append(options) or 0)
    assert cli.main(["bench", "a:b"]) == 0
    arguments = "a.py:b --sharding data,None --batch-size 8 --workers processes:4 --step-ms 2.5 --seconds 3 --json"
    assert cli.main(["bench", *arguments.split()]) == 0
    given: Any = {"axes": ("data", None), "batch_size": 8, "workers": ps.Processes(4), "step_ms": 2.5, "seconds": 3.0, "as_json": True}
    assert told == [bench.Options(factory="a:b"), bench.Options(factory="a.py:b", **given)]


def test_settings_that_cannot_work_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo = pytest.importorskip("prefetchshard.app.demo")

    def refuse(options: object) -> int:
        raise ConfigError("batch_size=63 does not divide")

    monkeypatch.setattr(demo, "run", refuse)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "prefetchshard: error: batch_size=63 does not divide\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "data=0"], "axis 'data' has size 0"),
        (["--mesh", "data=3"], "needs 3 devices"),
        (["--mesh", "data=-1,model=-1"], "only one axis may be -1"),
        (["--mesh", "a=2,b=2,c=2", "--batch-size", "12"], "batch_size=12"),
        (["--batch-size", "63"], "batch_size=63"),
    ],
)
def test_a_mesh_or_batch_that_cannot_be_is_said_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(arguments, said, capsys)


def assert_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo is refused, with exit code 2 and one line on the standard error."""
    pytest.importorskip("prefetchshard.app.demo")
    assert cli.main(["demo", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prefetchshard: error: ")
    assert said in line


def file_below(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def circle_of_links(folder: Path) -> Path:
    (folder / "circle").symlink_to(folder / "circle")
    return folder / "circle"


UNUSABLE: dict[str, Callable[[Path], Path]] = {
    "a file": file_below,
    "below a file": lambda folder: file_below(folder) / "below",
    "below a device": lambda _: Path(os.devnull) / "below",
    "a circle of links": circle_of_links,
    "a name that is too long": lambda folder: folder / ("x" * 5000),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_folder_that_cannot_be_made_is_said_in_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = UNUSABLE[kind](tmp_path)
    assert_one_line(["--checkpoint", str(path)], f"--checkpoint {path}: no file can be written there", capsys)


def saved(file: Path, **other: Any) -> None:
    """Writes a checkpoint with other values in place of some."""
    state = ps.Loader(np.zeros(8), batch_size=8).state().encode()
    np.savez(file, **{"leaf0": np.zeros(100), "accuracy": np.float64(0.5), "loader": np.frombuffer(state, np.uint8), **other})


def one_array(file: Path) -> None:
    with open(file, "wb") as opened:
        np.save(opened, np.zeros(3))


def changed(file: Path, change: Callable[[bytearray], object]) -> None:
    saved(file)
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)


def flip(data: bytearray) -> None:
    data[data.index(b"leaf0.npy") + 200] ^= 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "empty": Path.touch,
    "other bytes": lambda file: file.write_bytes(b"other bytes"),
    "one array": one_array,
    "cut off": lambda file: changed(file, lambda data: data.__delitem__(slice(100, None))),
    "another byte": lambda file: changed(file, flip),
    "other names": lambda file: np.savez(file, a=1, b=2, c=3),
    "objects": lambda file: saved(file, leaf0=np.array([None])),
    "no number": lambda file: saved(file, accuracy=np.zeros(3)),
    "no state": lambda file: saved(file, loader=np.zeros(9, np.uint8)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_no_checkpoint_is_said_in_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGES[kind](tmp_path / "digits.npz")
    assert_one_line(["--checkpoint", str(tmp_path)], f"--checkpoint: {tmp_path / 'digits.npz'} is no checkpoint of this demo", capsys)


def test_a_checkpoint_that_does_not_fit_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = pytest.importorskip("prefetchshard.app.demo")
    loader, _ = demo.loaders(demo.Options(epochs=2), ps.make_mesh({"data": -1}), demo.digits(0), None)
    demo.Checkpoint(tmp_path).save(demo.Saved([np.zeros(3)], 0.5, loader.state()))
    for arguments, said in (
        (["--epochs", "2"], "another network"),
        (["--batch-size", "32"], "batch_size: the state has 64, this loader 32"),
        (["--seed", "1"], "seed: the state has 0, this loader 1"),
    ):
        assert_one_line(["--checkpoint", str(tmp_path), *arguments], said, capsys)


def test_a_checkpoint_that_cannot_be_written_is_said_and_the_old_one_stays(tmp_path: Path) -> None:
    demo = pytest.importorskip("prefetchshard.app.demo")
    checkpoint = demo.Checkpoint(tmp_path / "new" / "folder")
    first = demo.Saved([np.zeros(3)], 0.5, ps.Loader(np.zeros(8), batch_size=8).state())
    checkpoint.save(first)
    (tmp_path / "new" / "folder" / "digits.new.npz").mkdir()  # stands for a full disk
    with pytest.raises(ps.ConfigError, match=r"--checkpoint: .*digits\.npz cannot be written: "):
        checkpoint.save(first._replace(accuracy=0.75))
    assert checkpoint.load().accuracy == 0.5


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
