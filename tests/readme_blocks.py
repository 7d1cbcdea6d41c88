"""The Python blocks of the README, and a program that runs them: each in a copy of what the first one defines."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax

from support import REPOSITORY, stacks, threads_left

README = REPOSITORY / "README.md"
CORE = {"anyio", "jax", "numpy", "prefetchshard"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One block: the line of the README where its code begins, and the code."""

    line: int
    code: str

    @property
    def extras(self) -> frozenset[str]:
        """The packages that it imports beside the core ones and the standard library."""
        imports = [node for node in ast.walk(ast.parse(self.code)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in imports for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])}
        return frozenset({str(name).partition(".")[0] for name in names} - CORE - sys.stdlib_module_names)

    def run(self, namespace: dict[str, object]) -> None:
        # Empty lines before it, so that tracebacks show lines of the README. Top-level await is what a notebook allows.
        code = compile("\n" * (self.line - 1) + self.code, str(README), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def blocks() -> list[Block]:
    """All Python blocks, the one that defines the names first."""
    text = README.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def waiting(step: Any) -> Callable[..., Any]:
    """A step that is waited for.

    XLA's CPU backend takes 32 programs a device ahead; loops that have more in flight on several devices hang there now and then on a
    busy machine, also without any loader.
    """
    return lambda *args: jax.block_until_ready(step(*args))


def trouble_with(block: Block, first: Block) -> str | None:
    """Runs one block after the first. Returns what went wrong, if anything did."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            first.run(namespace)
            namespace["train_step"] = waiting(namespace["train_step"])
            block.run(namespace)
    except BaseException:  # noqa: BLE001 - whatever a block raises is reported, and the others are run
        return traceback.format_exc()
    namespace.clear()
    left = threads_left()
    return f"threads left:\n{stacks(left)}" if left else None


def main(lines: list[str]) -> None:
    """Runs the blocks that begin at these lines; prints what went wrong with each as one JSON object."""
    warnings.simplefilter("error")
    first, *_ = every = blocks()
    troubles = {block.line: trouble_with(block, first) for block in every if str(block.line) in lines}
    sys.stdout.write(json.dumps(troubles))


if __name__ == "__main__":
    main(sys.argv[1:])
