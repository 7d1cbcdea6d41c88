"""Imports point down, the core needs its four dependencies alone, and importing the package does nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import PACKAGE, REPOSITORY, run_python

# By rank, lowest first. A file imports only from files of a lower rank. A subpackage has one rank for all its files, unless a
# file of it is named by itself; its `__init__.py` may import the files beside it.
LAYERS = [
    ["base.clock"],
    [
        "base.agreement",
        "base.errors",
        "base.jax_context",
        "base.waiters",
        "base.event_loop",
        "base",
        "ordering",
        "sharding",
        "leaves",
        "staging",
        "queues",
        "measuring",
        "planning",
        "resuming",
        "reading",
        "placing",
        "on_device",
        "running",
        "building",
        "telling",
        "app",
    ],
    [
        "base.batches",
        "base.threads",
        "running.before_3_14",
        "queues.bounded_queue",
        "base.config",
        "base.limits",
        "sharding.meshes",
        "ordering.epoch_order",
        "sources.dataset",
        "resuming.loader_state",
        "sharding.batch_tree",
    ],
    [
        "running.thread_group",
        "base.faults",
        "leaves.converting",
        "sharding.leaf_sharding",
        "sources.stateful",
        "staging.aliased",
        "placing.transfer",
    ],
    ["running.closing", "planning.packing", "staging.pinned", "sharding.rules", "sources.arrays", "sources.iterables", "measuring.stats"],
    [
        "running.at_exit",
        "placing.device_transform",
        "reading.user_functions",
        "planning.planner",
        "sources.asynchronous",
        "sources.device_arrays",
    ],
    ["queues.async_waiting", "planning.full_batches", "on_device.gathering", "resuming.sampling", "sources", "placing.transfer_loops"],
    ["reading.filling", "on_device.store"],
    ["reading.reading_plan", "testing.source_checks"],
    ["resuming.start_point", "resuming.replay", "reading.row_reader", "running.run"],
    ["reading.stream_reader"],
    ["building.run_factory"],
    ["iterator"],
    ["loader", "telling.describe", "testing.fakes"],
    ["testing"],
    ["__init__", "checkpoint"],
    ["app.demo"],  # a user of the public names
    ["app.cli"],
    ["__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

CORE_DEPENDENCIES = {"jax", "numpy", "anyio", "msgspec"}
USES_EXTRAS = {
    "checkpoint",
    "app.demo",
}  # may import what an extra brings as soon as it is imported itself; nothing imports it before it is used

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    """The dotted name below the package: "stages", "sources", "sources.arrays", "__init__"."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def layer_of(module: str) -> str | None:
    """The entry of LAYERS that a module falls under: its own, or else that of the nearest subpackage."""
    while module not in RANK and "." in module:
        module = module.rpartition(".")[0]
    return module if module in RANK else None


def imported_modules(file: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in it; relative imports are made absolute."""
    package = (PACKAGE.name, *file.relative_to(PACKAGE).parts[:-1])
    for node in nodes or ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def our_module(imported: str) -> str | None:
    """Which file of the package an imported dotted name stands for; None where it is not ours."""
    head, _, rest = imported.partition(".")
    if head != PACKAGE.name:
        return None
    parts = rest.split(".") if rest else []
    while parts and not (PACKAGE.joinpath(*parts).with_suffix(".py").exists() or PACKAGE.joinpath(*parts, "__init__.py").exists()):
        parts.pop()
    return ".".join(parts) or "__init__"


def at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not the bodies of functions, not `if TYPE_CHECKING`."""
    for node in body:
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from at_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from at_import(handler.body)


def test_every_file_has_a_rank_and_every_rank_a_file() -> None:
    names = {module_name(file): file for file in FILES}
    unranked = [str(file.relative_to(REPOSITORY)) for name, file in names.items() if layer_of(name) is None]
    assert not unranked, "give these files a rank in LAYERS"
    assert not sorted(set(RANK) - set(names)), "LAYERS names files that do not exist"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_down(file: Path) -> None:
    name = module_name(file)
    own = layer_of(name)
    assert own is not None
    wrong: list[str] = []
    for line, imported in imported_modules(file):
        target = our_module(imported)
        if target is None:
            continue
        layer = layer_of(target)
        below = layer is not None and RANK[layer] < RANK[own]
        beside = file.name == "__init__.py" and target.startswith(f"{name}.")
        if not (below or beside):
            wrong.append(f"{file.relative_to(REPOSITORY)}:{line} imports {target}")
    assert not wrong


@pytest.mark.parametrize("file", [file for file in FILES if module_name(file) not in USES_EXTRAS], ids=module_name)
def test_only_core_dependencies_are_imported_at_import(file: Path) -> None:
    allowed = CORE_DEPENDENCIES | {PACKAGE.name} | sys.stdlib_module_names
    tree = ast.parse(file.read_text(), str(file))
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{line} imports {imported}"
        for line, imported in imported_modules(file, at_import(tree.body))
        if imported.partition(".")[0] not in allowed
    ]
    assert not wrong


def test_importing_the_package_does_nothing() -> None:
    """No thread is started, no device touched, nothing imported that only an extra brings."""
    program = """
        import sys, threading
        import prefetchshard
        import jax

        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        heavy = {"torch", "tensorflow", "grain", "datasets", "optax", "orbax", "rich", "sklearn", "trio", "prefetchshard.app.demo"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has been started
        assert jax.device_count() == 3
    """
    done = run_python(program, env={"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
