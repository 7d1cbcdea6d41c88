"""Imports point down, the core needs its four dependencies alone, and importing the package does nothing."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import PACKAGE, REPOSITORY, run_python

# By rank, lowest first. A package imports only from packages of a lower rank, and from itself; no import goes round in a circle.
RANKS = [
    {"base"},
    {"streaming"},
    {"ordering", "sharding", "leaves", "staging", "queues"},
    {"measuring", "sources"},
    {"planning"},
    {"placing", "processes", "resuming"},
    {"on_device", "reading"},
    {"running"},
    {"building"},
    {"consumer", "telling"},
    {"iterator", "plotting"},
    {"loader"},
    {"benchmarking"},  # compares a loader with what one writes by hand
    {"__init__", "checkpoint", "exporting", "testing"},
    {"app"},  # a user of the public names; `doctor` measures with the parts themselves
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}

# What a lower rank would allow, and is still not to be: the thread that calls JAX never runs the source's code.
FORBIDDEN = {
    "reading": {"placing"},
    "placing": {"reading", "sources"},
    "sources": {"resuming", "reading", "placing"},
}
NOBODY_IMPORTS = {"testing", "app", "exporting"}

# Who may move data to devices, or compile.
MAY_CALL = {
    "device_put": {"placing", "on_device", "staging.pinned", "leaves.on_devices"},
    "make_array_from_callback": {"placing", "on_device"},
    "jit": {"placing", "on_device", "planning.packing"},
}

CORE_DEPENDENCIES = {"jax", "numpy", "anyio", "msgspec"}
USES_EXTRAS = {
    "checkpoint",
    "app.demo",
    "telling.drawing",
    "exporting.prometheus",
}  # may import what an extra brings as soon as it is imported itself; nothing imports it before it is used

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    """The dotted name below the package: "stages", "sources", "sources.arrays", "__init__"."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def package_of(module: str) -> str:
    """The room that a module lies in: a package, or a file at the top."""
    return module.partition(".")[0]


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


def ours_in(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import of our own modules."""
    for line, imported in imported_modules(file):
        target = our_module(imported)
        if target is not None:
            yield line, target


def test_every_room_has_a_rank_and_every_rank_a_room() -> None:
    assert {package_of(module_name(file)) for file in FILES} == set(RANK)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_down(file: Path) -> None:
    own = package_of(module_name(file))
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{line} imports {target}"
        for line, target in ours_in(file)
        if package_of(target) != own and RANK[package_of(target)] >= RANK[own]
    ]
    assert not wrong


def test_no_import_goes_round_in_a_circle() -> None:
    imports = {module_name(file): {target for _, target in ours_in(file)} - {module_name(file)} for file in FILES}
    sorter = graphlib.TopologicalSorter(imports)
    sorter.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_rooms_that_must_not_know_each_other(file: Path) -> None:
    own = package_of(module_name(file))
    refused = FORBIDDEN.get(own, set()) | (NOBODY_IMPORTS - {own} if own != "__main__" else set())
    wrong = [f"{file.relative_to(REPOSITORY)}:{line} imports {target}" for line, target in ours_in(file) if package_of(target) in refused]
    assert not wrong


def test_the_command_line_and_the_demo_are_users_of_the_public_names() -> None:
    known = {
        f"{module_name(file)}:{line} imports {target}"
        for file in FILES
        if module_name(file) in ("app.cli", "app.demo")
        for line, target in ours_in(file)
        if target != "__init__" and package_of(target) != "app"
    }
    assert not known


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_few_rooms_move_data_to_devices_or_compile(file: Path) -> None:
    name = module_name(file)
    if package_of(name) in ("app", "benchmarking", "testing"):
        return  # users of JAX like any other
    if name == "base.jax_types":
        return  # names them, with their types, for those that may
    tree = ast.parse(file.read_text())
    called = {node.attr: node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called |= {alias.name: node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{called[call]} uses {call}"
        for call, rooms in MAY_CALL.items()
        if call in called and not rooms & {name, package_of(name)}
    ]
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
        heavy = {"torch", "tensorflow", "grain", "datasets", "optax", "orbax", "prometheus_client", "rich", "sklearn", "trio", "prefetchshard.app.demo"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has been started
        assert jax.device_count() == 3
    """
    done = run_python(program, env={"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
