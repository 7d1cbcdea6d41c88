"""What the README shows, works as it stands."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from readme_blocks import README, Block, blocks
from support import REPOSITORY, run_python

COMMANDS = [
    "python -m pip install '.[demo]' && python -m prefetchshard demo",
    "python -m pip install -e '.[test]' && python -m pytest",
]
BLOCKS = blocks()
WITH_CORE = [block for block in BLOCKS if not block.extras]
WITH_EXTRAS = [block for block in BLOCKS if block.extras]


def block_id(block: Block) -> str:
    return f"line_{block.line}" + "".join(f"_{name}" for name in sorted(block.extras))


def troubles_with(some: list[Block], timeout: float) -> dict[int, str | None]:
    lines = tuple(str(block.line) for block in some)
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    done = run_python("import sys, readme_blocks; readme_blocks.main(sys.argv[1:])", timeout, args=lines, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return {int(line): trouble for line, trouble in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def core_troubles() -> dict[int, str | None]:
    """All blocks that need the core alone, run in one program."""
    return troubles_with(WITH_CORE, timeout=150)


@pytest.mark.parametrize("block", WITH_CORE, ids=block_id)
def test_block_runs(block: Block, core_troubles: dict[int, str | None]) -> None:
    trouble = core_troubles[block.line]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)


@pytest.mark.ecosystem
@pytest.mark.parametrize("block", WITH_EXTRAS, ids=block_id)
def test_block_with_other_loaders_runs(block: Block) -> None:
    for name in block.extras:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    trouble = troubles_with([block], timeout=150)[block.line]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_stand_on_a_line_of_their_own(command: str) -> None:
    assert command in README.read_text().splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_ci_runs_the_command_as_it_stands(command: str) -> None:
    assert command in (REPOSITORY / ".ci" / "run").read_text()
