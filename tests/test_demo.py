"""The demonstration, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, run_command


def demo(*arguments: str, timeout: float = 120.0) -> tuple[int, str]:
    done = run_command([sys.executable, "-W", "error", "-m", "prefetchshard", "demo", *arguments], timeout)
    assert done.stderr == ""
    return done.returncode, done.stdout


def fingerprint(output: str) -> str:
    found = re.search(r"Fingerprint of the final parameters: (\w+)", output)
    assert found, output
    return found[1]


def test_it_learns_and_says_so() -> None:
    code, output = demo("--epochs", "4")
    assert code == 0
    assert "8 cpu devices" in output
    assert "The first batch, as it lies on the devices:" in output
    assert len(re.findall(r"^epoch +\d+ +loss [\d.]+ +held-out digits right: \d+ of 359 \([\d.]+%\)$", output, re.MULTILINE)) == 4
    assert re.search(r"88 steps in [\d.]+ s\.\nThe training loop waited for input [\d.]+% of the time\.", output)
    assert "\x1b" not in output


def test_too_little_training_fails() -> None:
    code, output = demo("--epochs", "1", "--mesh", "data=4,model=2")
    assert code == 1
    assert "mesh data=4, model=2" in output
    assert "Failed:" in output


def test_a_batch_that_does_not_divide_is_refused() -> None:
    done = run_command([sys.executable, "-m", "prefetchshard", "demo", "--batch-size", "63"])
    assert done.returncode == 2
    assert done.stderr.startswith("prefetchshard: error: ")
    assert "63" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_plain_and_async_loops_learn_the_same(mesh: str) -> None:
    outputs = [demo("--epochs", "6", "--mesh", mesh, *extra) for extra in ([], ["--async"], ["--async", "--backend", "trio"])]
    assert [code for code, _ in outputs] == [0, 0, 0]
    assert len({fingerprint(output) for _, output in outputs}) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_result(tmp_path: Path) -> None:
    for attempt in range(10):
        arguments = ("--epochs", "4", "--checkpoint", str(tmp_path / f"new {attempt}" / "folder"))
        command = [sys.executable, "-u", "-m", "prefetchshard", "demo", *arguments]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            for line in killed.stdout:
                if line.startswith("epoch   3"):
                    break
            killed.kill()
        code, output = demo(*arguments)
        assert code == 0
        if not re.search(r"after step 88$", output, re.MULTILINE):  # the last one: the kill came late, which a busy machine does
            break
    assert re.search(r"going on from .*folder, after step (50|66|75)$", output, re.MULTILINE)
    assert fingerprint(output) == fingerprint(demo("--epochs", "4")[1])
    code, again = demo(*arguments)
    assert (code, fingerprint(again)) == (0, fingerprint(output))
    assert "0 steps in" in again


@pytest.mark.slow
def test_another_seed_learns_otherwise() -> None:
    first, second = (demo("--epochs", "1", "--seed", seed)[1] for seed in ("1", "2"))
    assert fingerprint(first) != fingerprint(second)
