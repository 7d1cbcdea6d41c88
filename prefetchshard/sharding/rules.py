"""Resolves `sharding=`, when the loader is made, to a rule for each part of a batch."""

from __future__ import annotations

import contextlib
import functools
import math
import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.codec import shown
from prefetchshard.base.config import HOST, HostType
from prefetchshard.base.errors import ConfigError, PlacementError, SourceError
from prefetchshard.base.jax_context import mesh_in_force
from prefetchshard.base.jax_types import (
    Device,
    Keys,
    TreeDef,
    config,
    devices,
    local_devices,
    process_index,
    tree_flatten_with_path,
)
from prefetchshard.base.number_lists import is_number_list
from prefetchshard.base.signatures import misfit
from prefetchshard.sharding.batch_tree import BatchTree, mismatch, path_text
from prefetchshard.sharding.host_paths import check_found, check_rules, paths_of
from prefetchshard.sharding.leaf_sharding import fit, replicated_like
from prefetchshard.sharding.meshes import (
    check_spec,
    devices_of,
    mesh_of,
    mesh_text,
    row_split,
    sharding_text,
    spec_axes,
    spec_text,
)
from prefetchshard.sharding.plain import as_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Shape = tuple[int, ...]
Placed: TypeAlias = "Sharding | HostType"
Rule: TypeAlias = "Placed | Callable[[str, Shape, Any], Any]"

MOST_KINDS = 64
"""Types of leaves that one structure is remembered with."""

FORMS = (
    "a Sharding, a 1-D Mesh, a PartitionSpec, None, ps.HOST, a callable (path, shape, dtype) -> one of these, or a pytree prefix of these"
)


class NoLeavesError(SourceError):
    """A batch or an example without any leaf. Whoever knows which one it is says so in place of this."""


class _Seen:
    """A structure that was seen, by which the next batch is taken apart if it has the same.

    Attributes:
        tree: the structure.
        take_apart: the leaves of a batch with these containers, where other containers may lie in place of leaves.
        kinds: types of leaves, in order, with which no leaf is a container.
        lists: which leaves are lists of numbers.
    """

    __slots__ = ("kinds", "lists", "take_apart", "tree")

    def __init__(self, tree: BatchTree, lists: tuple[int, ...]) -> None:
        self.tree = tree
        self.take_apart = tree.tree.flatten_up_to
        self.kinds: set[tuple[type, ...]] = set()
        self.lists = lists


class ShardingRules:
    """`sharding=`, resolved when the loader was made, with the mesh and the default device in force at that time.

    Thread safety: any thread may call any method.
    """

    def __init__(self, prefix: TreeDef, found: Sequence[tuple[Keys, Any]], *, scope: _Scope, tree: Any, host: Sequence[str]) -> None:
        self._prefix = prefix
        self._keys = tuple([keys for keys, _ in found])
        self._rules: tuple[Rule, ...] = (*(_resolve_at(scope, keys, rule) for keys, rule in found), HOST)  # the last one is for `host`
        self._is_default = (*(rule is None for _, rule in found), False)
        self._scope = scope
        self._tree = tree
        self._host = frozenset(host)
        places = [path_text(keys) for keys in self._keys]
        self._places = {path: i for i, path in enumerate(places)}
        self._above = {path_text(keys[:length]) for keys in self._keys for length in range(len(keys))}
        self._whole = self._host.union(path for path, rule in zip(places, self._rules, strict=False) if rule is HOST)
        self._seen: _Seen | None = None

    def flatten(self, batch: Any) -> tuple[list[Any], BatchTree]:
        """The leaves of a batch and its tree.

        A part that stays on the host is one leaf, whatever it holds, and so is a list of numbers. A mapping of a type that JAX does not
        know is taken for a dict.

        Raises:
            NoLeavesError: there is no leaf, or the batch is None.
            PlacementError: the tree of rules is no prefix of the batch; the message says where and how they differ.
            ConfigError: a path of `host` is not in the batch.
            BatchError: a container of the batch holds itself.
        """
        seen = self._seen
        if seen is None:
            return self._flatten_anew(batch)
        try:
            leaves = seen.take_apart(batch)
        except (ValueError, TypeError):
            return self._flatten_anew(batch)
        if tuple(map(type, leaves)) not in seen.kinds or (seen.lists and not all(is_number_list(leaves[i]) for i in seen.lists)):
            return self._flatten_anew(batch)
        return leaves, seen.tree

    def _flatten_anew(self, batch: Any) -> tuple[list[Any], BatchTree]:
        """As `flatten`, of a batch that may look like none before it."""
        if batch is None:
            raise NoLeavesError("it is None")
        plain = as_plain(batch, self._stays_whole)
        found: set[str] = set()

        def is_leaf(keys: Keys, node: Any) -> bool:
            path = path_text(keys)
            if path in self._whole:
                found.add(path)
                return True
            return is_number_list(node) and path not in self._above

        keyed, tree = tree_flatten_with_path(plain, is_leaf=is_leaf, is_leaf_takes_path=True)
        if not keyed:
            raise NoLeavesError(f"it is {reprlib.repr(batch)}")
        self._check_prefix(plain)
        structure = self._structure(keyed, tree)
        if self._host:
            check_found(sorted(self._host), found, structure.paths)
        leaves = [leaf for _, leaf in keyed]
        seen = self._seen
        if seen is None or seen.tree != structure:
            on_host = self.on_host(structure)
            seen = _Seen(structure, tuple([i for i, leaf in enumerate(leaves) if not on_host[i] and type(leaf) is list]))
        if len(seen.kinds) >= MOST_KINDS:
            seen.kinds.clear()
        seen.kinds.add(tuple(map(type, leaves)))
        self._seen = seen
        return leaves, seen.tree

    def flatten_arrays(self, batch: Any) -> BatchTree:
        """The tree of a batch of arrays; unlike in `flatten`, each array in a part that stays on the host is a leaf of its own."""
        self._check_prefix(batch)
        keyed, tree = tree_flatten_with_path(batch)
        structure = self._structure(keyed, tree)
        if self._host:
            found = {path_text(keys[:length]) for keys, _ in keyed for length in range(len(keys) + 1)}
            check_found(sorted(self._host), found, structure.paths)
        return structure

    def _stays_whole(self, keys: Keys) -> bool:
        return bool(self._whole) and path_text(keys) in self._whole

    def _check_prefix(self, batch: Any) -> None:
        try:
            self._prefix.flatten_up_to(batch)
        except (ValueError, TypeError) as error:
            difference = mismatch(self._tree, batch, _is_rule)
            raise difference or PlacementError(f"sharding is no prefix of the batch: {error}") from error

    def _structure(self, keyed: Sequence[tuple[Keys, Any]], tree: TreeDef) -> BatchTree:
        paths: list[str] = []
        named: list[bool] = []
        rules: list[int] = []
        for keys, _ in keyed:
            on_the_way = [path_text(keys[:length]) for length in range(len(keys) + 1)]
            place = next(path for path in on_the_way if path in self._places)
            rule = len(self._keys) if not self._host.isdisjoint(on_the_way) else self._places[place]
            paths.append(on_the_way[-1])
            named.append(place == on_the_way[-1] and not self._is_default[rule])
            rules.append(rule)
        return BatchTree(tree, paths=tuple(paths), named=tuple(named), rules=tuple(rules))

    def resolved(self, structure: BatchTree, shapes: Sequence[Shape], dtypes: Sequence[Any]) -> list[Placed]:
        """The rule of each leaf, after calling callables. Does not check that it fits: a short batch need not."""
        return [placed for placed, _ in self._answers(structure, shapes, dtypes)]

    def _answers(self, structure: BatchTree, shapes: Sequence[Shape], dtypes: Sequence[Any]) -> list[tuple[Placed, bool]]:
        """The rule of each leaf, after calling callables, and whether it was made for the leaf itself."""
        rules = [self._rules[i] for i in structure.rules]
        each = zip(rules, structure.paths, shapes, dtypes, strict=True)
        given = [rule(path, shape, dtype) if callable(rule) else rule for rule, path, shape, dtype in each]
        if given == rules:
            return [(rule, named) for rule, named in zip(given, structure.named, strict=True)]  # pyright: ignore[reportReturnType] - no callables
        scope = self._scope
        if scope.beside is None:  # only what the callables answer says where the others go
            try:
                scope = _scope_of(scope.in_force, given, none_replicates=scope.none_replicates)
            except ConfigError as error:
                raise PlacementError(f"the sharding callable gave what cannot be used: {error}") from error
        each = zip(given, rules, structure.paths, structure.named, strict=True)
        return [
            (_answered(answer, scope, path), answer is not None) if callable(rule) else (rule, named) for answer, rule, path, named in each
        ]

    def shardings(self, structure: BatchTree, shapes: Sequence[Shape], dtypes: Sequence[Any]) -> list[Placed]:
        """The sharding of each leaf, or `HOST`.

        Args:
            structure: from `flatten`.
            shapes: global shape of each leaf; ignored for leaves that stay on the host.
            dtypes: dtype of each leaf, passed to callable rules.

        Raises:
            PlacementError: a leaf does not fit; the message names path, shape, spec and mesh, and says what to change.
        """
        answers = zip(self._answers(structure, shapes, dtypes), structure.paths, shapes, strict=True)
        return [HOST if rule is HOST else fit(rule, path, shape, named=named) for (rule, named), path, shape in answers]

    def on_host(self, structure: BatchTree) -> tuple[bool, ...]:
        """For each leaf, whether its rule is `HOST`. Callable rules, which need the leaf, count as False."""
        return tuple([self._rules[i] is HOST for i in structure.rules])

    def device(self) -> Device:
        """A device that the rules name, one of this process if possible; the first local device if all rules are callables or `HOST`."""
        for rule in self._rules:
            if isinstance(rule, Sharding):
                return next((d for d in devices_of(rule) if d.process_index == process_index()), devices_of(rule)[0])
        return local_devices()[0]

    def batch_split(self) -> int | None:
        """The number of pieces into which the rules split axis 0, or their least common multiple; None if a callable decides."""
        if any(callable(rule) for rule in self._rules):
            return None
        return math.lcm(*(row_split(rule) for rule in self._rules if isinstance(rule, Sharding)))

    def __str__(self) -> str:
        each = zip(self._keys, self._rules, strict=False)  # without the one for `host`
        texts = [f"{path_text(keys)}: {_rule_text(rule)}" if keys else _rule_text(rule) for keys, rule in each]
        return "; ".join([*texts, *(f"{path}: {HOST!r}" for path in sorted(self._host))])

    def __repr__(self) -> str:
        return f"ShardingRules({self})"


class _Scope(NamedTuple):
    """Supplies devices to rules that name none.

    Attributes:
        in_force: the mesh that was in force when the loader was made.
        companion: another rule of the tree that names devices; bare specs take its mesh where none is in force.
        beside: where the other leaves go; None takes these devices.
        none_replicates: None means replicated, not the default.
    """

    in_force: Mesh | None
    companion: Sharding | None = None
    beside: Sharding | None = None
    none_replicates: bool = False

    def of_spec(self, spec: PartitionSpec) -> Sharding:
        mesh = self._mesh()
        axes = set(spec_axes(spec))
        if mesh is None and len(axes) == 1:
            mesh = _mesh_over_all(next(iter(axes)))
        if mesh is None and axes:
            raise ConfigError(
                f"{spec_text(spec)} names {len(axes)} mesh axes, but no mesh is in force: pass NamedSharding(mesh, {spec_text(spec)}), "
                f"or make the loader under jax.set_mesh(mesh)"
            )
        if mesh is None:
            return self.replicated()
        check_spec(spec, mesh)
        return NamedSharding(mesh, spec)

    def of_mesh(self, mesh: Mesh) -> Sharding:
        if len(mesh.axis_names) != 1:
            raise ConfigError(f"the mesh {mesh_text(mesh)} does not say which of its axes cuts the rows: pass NamedSharding(mesh, P(...))")
        return _rows_over(mesh)

    def replicated(self) -> Sharding:
        if self.companion is not None:
            return replicated_like(self.companion)
        return NamedSharding(_mesh_over_all("data") if self.in_force is None else self.in_force, PartitionSpec())

    def default(self) -> Sharding:
        """The rows split over the devices of the other leaves; else the default device; else the rows over all devices."""
        beside, device = self.beside, config.jax_default_device
        if isinstance(beside, NamedSharding):
            return _rows_over(mesh_of(beside))
        if beside is not None:
            held = devices_of(beside)
            return SingleDeviceSharding(held[0]) if len(held) == 1 else _rows_over(Mesh(np.array(held), ("data",)))
        if device is not None:
            return SingleDeviceSharding(local_devices(backend=device)[0] if isinstance(device, str) else device)
        return _rows_over(_mesh_over_all("data") if self.in_force is None else self.in_force)

    def _mesh(self) -> Mesh | None:
        if self.in_force is None and isinstance(self.companion, NamedSharding):
            return mesh_of(self.companion)
        return self.in_force

    def resolve(self, rule: Any) -> Rule:
        if rule is None:
            return self.replicated() if self.none_replicates else self.default()
        if isinstance(rule, Mesh):
            return self.of_mesh(rule)
        if isinstance(rule, PartitionSpec):
            return self.of_spec(rule)
        if isinstance(rule, NamedSharding):
            check_spec(rule.spec, mesh_of(rule))
            return rule
        if rule is HOST or isinstance(rule, Sharding) or (callable(rule) and not isinstance(rule, type)):
            return rule
        raise ConfigError(f"{shown(rule)} (type {type(rule).__name__}) is no sharding: {_hint(rule)}")


def resolve(sharding: Any, host: Any = (), *, none_replicates: bool = False) -> ShardingRules:
    """Resolve `sharding=` (see `Loader`) with the mesh and the default device in force in this thread.

    Args:
        sharding: what the user passed.
        host: paths of leaves that stay on the host.
        none_replicates: what None in a tree means: replicated, not the default.

    Raises:
        ConfigError: it has none of the allowed forms, or fits no batch; the message names the path in the tree.
    """
    found, prefix = tree_flatten_with_path(sharding, is_leaf=_is_rule)
    if not found:
        raise ConfigError(f"sharding={sharding!r} holds no rule: pass {FORMS}")
    paths = paths_of(host)
    check_rules(paths, found)
    scope = _scope_of(mesh_in_force(), [rule for _, rule in found], none_replicates=none_replicates)
    return ShardingRules(prefix, found, scope=scope, tree=sharding, host=paths)


def _scope_of(in_force: Mesh | None, rules: Sequence[Any], *, none_replicates: bool) -> _Scope:
    """Where the rules of a tree that name no devices take them from: a rule that does. A rule that is wrong is not looked at."""
    scope = _Scope(in_force, none_replicates=none_replicates)
    fixed = _resolvable(scope, [rule for rule in rules if isinstance(rule, Mesh | Sharding)])
    fixed.sort(key=lambda rule: not isinstance(rule, NamedSharding))
    takes_devices = any(rule is None or (in_force is None and isinstance(rule, PartitionSpec)) for rule in rules)
    if takes_devices and any(devices_of(rule) != devices_of(fixed[0]) for rule in fixed):
        raise ConfigError(
            "sharding has rules over different devices, so that None and bare specs in it are ambiguous: use NamedSharding there"
        )
    scope = scope._replace(companion=fixed[0] if fixed else None)
    specs = [rule for rule in rules if isinstance(rule, PartitionSpec) and PartitionSpec.UNCONSTRAINED not in tuple(rule)]
    specs.sort(key=lambda spec: not spec_axes(spec))
    beside = fixed or _resolvable(scope, specs)
    return scope._replace(beside=beside[0] if beside else None)


def _resolvable(scope: _Scope, rules: Sequence[Any]) -> list[Sharding]:
    found: list[Sharding] = []
    for rule in rules:
        with contextlib.suppress(ConfigError):  # said where the rule is resolved, with its place
            resolved = scope.resolve(rule)
            assert isinstance(resolved, Sharding)
            found.append(resolved)
    return found


def _resolve_at(scope: _Scope, keys: tuple[Any, ...], rule: Any) -> Rule:
    where = f"sharding{f' at {path_text(keys)!r}' if keys else ''}"
    try:
        resolved = scope.resolve(rule)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    why = misfit(resolved, "", (), None) if callable(resolved) else None
    if why is not None:
        raise ConfigError(f"{where}: the function is called with (path, shape, dtype), and cannot be: {why}")
    return resolved


def _is_rule(node: Any) -> bool:
    # PartitionSpec has been a tuple in some versions of JAX; functools.partial covers jax.tree_util.Partial, a pytree
    return node is None or isinstance(node, PartitionSpec | Sharding | Mesh | functools.partial)


def _hint(rule: Any) -> str:
    if isinstance(rule, str):
        return f"write PartitionSpec({rule!r})"
    if isinstance(rule, type):
        return f"it is a class; make one of it, such as NamedSharding(mesh, PartitionSpec('data')), or pass {FORMS}"
    if hasattr(rule, "platform") and hasattr(rule, "id"):
        return "for one device pass jax.sharding.SingleDeviceSharding(device)"
    return f"pass {FORMS}"


def _mesh_over_all(axis: Any) -> Mesh:
    return Mesh(np.array(devices()), (axis,))


def _rows_over(mesh: Mesh) -> NamedSharding:
    """The rows split over all devices of a mesh."""
    axes: Any = mesh.axis_names
    return NamedSharding(mesh, PartitionSpec(axes if len(axes) > 1 else axes[0]))


def _answered(answer: Any, scope: _Scope, path: str) -> Placed:
    """What a callable answered, resolved."""
    try:
        rule = scope.resolve(answer)
    except ConfigError as error:
        raise PlacementError(f"leaf {path or '(the batch itself)'}: the sharding callable gave what cannot be used: {error}") from error
    if isinstance(rule, Sharding) or rule is HOST:
        return rule
    raise PlacementError(f"leaf {path or '(the batch itself)'}: the sharding callable gave a callable, {answer!r}")


def _rule_text(rule: Rule) -> str:
    return sharding_text(rule) if isinstance(rule, Sharding) else repr(rule)
