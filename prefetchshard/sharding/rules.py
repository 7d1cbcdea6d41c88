"""Resolves `sharding=`, when the loader is made, to a rule for each part of a batch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.config import HOST, HostType
from prefetchshard.base.errors import ConfigError, PlacementError
from prefetchshard.base.jax_context import mesh_in_force
from prefetchshard.base.jax_types import (
    Device,
    TreeDef,
    config,
    devices,
    local_devices,
    process_index,
    tree_flatten,
    tree_flatten_with_path,
)
from prefetchshard.sharding.batch_tree import LEAF, BatchTree, leaf_paths, mismatch, path_text
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Shape = tuple[int, ...]
Placed: TypeAlias = "Sharding | HostType"
Rule: TypeAlias = "Placed | Callable[[str, Shape, Any], Any]"


FORMS = (
    "a Sharding, a 1-D Mesh, a PartitionSpec, None, ps.HOST, a callable (path, shape, dtype) -> one of these, or a pytree prefix of these"
)


class ShardingRules:
    """`sharding=`, resolved when the loader was made, with the mesh and the default device in force at that time.

    Thread safety: any thread may call any method.
    """

    def __init__(
        self, prefix: TreeDef, rules: Sequence[Rule], *, keys: Sequence[tuple[Any, ...]], is_default: bool, scope: _Scope, tree: Any
    ) -> None:
        self._prefix = prefix
        self._rules = tuple(rules)
        self._keys = tuple(keys)
        self._is_default = is_default
        self._scope = scope
        self._tree = tree
        self._is_single = prefix == LEAF
        self._seen: tuple[tuple[TreeDef, ...], BatchTree] | None = None

    def flatten(self, batch: Any) -> tuple[list[Any], BatchTree]:
        """The leaves of a batch and its tree. A part that stays on the host is one leaf, whatever it holds.

        Raises:
            PlacementError: the tree of rules is no prefix of the batch; the message says where and how they differ.
        """
        if self._is_single and self._rules[0] is not HOST:
            leaves, tree = _flatten(batch)
            trees = (tree,)
        else:
            leaves, trees = self._flatten_places(batch)
        seen = self._seen
        if seen is None or seen[0] != trees:
            self._seen = seen = (trees, self._structure(batch, trees))
        return leaves, seen[1]

    def flatten_arrays(self, batch: Any) -> BatchTree:
        """The tree of a batch of arrays; unlike in `flatten`, each array in a part that stays on the host is a leaf of its own."""
        trees = tuple([_flatten(part)[1] for part in self._places(batch)])
        return self._structure(batch, trees, opens_host=True)

    def _flatten_places(self, batch: Any) -> tuple[list[Any], tuple[TreeDef, ...]]:
        leaves: list[Any] = []
        trees: list[TreeDef] = []
        for rule, part in zip(self._rules, self._places(batch), strict=True):
            if rule is HOST or type(part) is np.ndarray:
                leaves.append(part)
                trees.append(LEAF)
            else:
                below, tree = _flatten(part)
                leaves += below
                trees.append(tree)
        return leaves, tuple(trees)

    def _places(self, batch: Any) -> list[Any]:
        try:
            return self._prefix.flatten_up_to(batch)
        except (ValueError, TypeError) as error:
            difference = mismatch(self._tree, batch, _is_rule)
            raise difference or PlacementError(f"sharding is no prefix of the batch: {error}") from error

    def _structure(self, batch: Any, trees: tuple[TreeDef, ...], *, opens_host: bool = False) -> BatchTree:
        paths: list[str] = []
        named: list[bool] = []
        rules: list[int] = []
        for i, (part, tree) in enumerate(zip(self._places(batch), trees, strict=True)):
            keys = self._keys[i]
            below = [path_text(keys)] if self._rules[i] is HOST and not opens_host else leaf_paths(part, keys)
            paths += below
            named += [not self._is_default and tree == LEAF] * len(below)
            rules += [i] * len(below)
        return BatchTree(self._prefix, trees, paths=tuple(paths), named=tuple(named), rules=tuple(rules))

    def resolved(self, structure: BatchTree, shapes: Sequence[Shape], dtypes: Sequence[Any]) -> list[Placed]:
        """The rule of each leaf, after calling callables. Does not check that it fits: a short batch need not."""
        rules = [self._rules[i] for i in structure.rules]
        return [
            _ask(rule, self._scope, path, shapes[n], dtypes[n]) if callable(rule) else rule
            for n, (rule, path) in enumerate(zip(rules, structure.paths, strict=True))
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
        found = self.resolved(structure, shapes, dtypes)
        return [
            HOST if rule is HOST else fit(rule, path, shapes[n], named=named or callable(self._rules[i]))
            for n, (rule, path, named, i) in enumerate(zip(found, structure.paths, structure.named, structure.rules, strict=True))
        ]

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
        each = zip(self._keys, self._rules, strict=True)
        return "; ".join(f"{path_text(keys)}: {_rule_text(rule)}" if keys else _rule_text(rule) for keys, rule in each)

    def __repr__(self) -> str:
        return f"ShardingRules({self})"


class _Scope(NamedTuple):
    """Supplies a mesh to rules that name none (None, bare specs): the one in force when the loader was made, or another rule's."""

    in_force: Mesh | None
    companion: Sharding | None  # of another rule in the tree

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
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))

    def replicated(self) -> Sharding:
        if self.companion is not None:
            return replicated_like(self.companion)
        return NamedSharding(_mesh_over_all("data") if self.in_force is None else self.in_force, PartitionSpec())

    def default(self) -> Sharding:
        device = config.jax_default_device
        if device is not None:
            return SingleDeviceSharding(local_devices(backend=device)[0] if isinstance(device, str) else device)
        mesh = _mesh_over_all("data") if self.in_force is None else self.in_force
        axes: Any = mesh.axis_names
        return NamedSharding(mesh, PartitionSpec(axes if len(axes) > 1 else axes[0]))

    def _mesh(self) -> Mesh | None:
        if self.in_force is None and isinstance(self.companion, NamedSharding):
            return mesh_of(self.companion)
        return self.in_force

    def resolve(self, rule: Any) -> Rule:
        if rule is None:
            return self.replicated()
        if isinstance(rule, Mesh):
            return self.of_mesh(rule)
        if isinstance(rule, PartitionSpec):
            return self.of_spec(rule)
        if isinstance(rule, NamedSharding):
            check_spec(rule.spec, mesh_of(rule))
            return rule
        if rule is HOST or isinstance(rule, Sharding) or callable(rule):
            return rule
        raise ConfigError(f"{rule!r} (type {type(rule).__name__}) is no sharding: {_hint(rule)}")


def resolve(sharding: Any) -> ShardingRules:
    """Resolve `sharding=` (see `Loader`) with the mesh and the default device in force in this thread.

    Raises:
        ConfigError: it has none of the allowed forms, or fits no batch; the message names the path in the tree.
    """
    in_force = mesh_in_force()
    if sharding is None:
        scope = _Scope(in_force, None)
        return ShardingRules(LEAF, [scope.default()], keys=[()], is_default=True, scope=scope, tree=None)
    found, prefix = tree_flatten_with_path(sharding, is_leaf=_is_rule)
    if not found:
        raise ConfigError(f"sharding={sharding!r} holds no rule: pass {FORMS}")
    alone = _Scope(in_force, None)
    fixed = [_resolve_at(alone, keys, rule) for keys, rule in found if not _is_open(rule)]
    scope = _Scope(in_force, companion_sharding(fixed, alone, [rule for _, rule in found]))
    rules = [_resolve_at(scope, keys, rule) for keys, rule in found]
    return ShardingRules(prefix, rules, keys=[keys for keys, _ in found], is_default=False, scope=scope, tree=sharding)


def _resolve_at(scope: _Scope, keys: tuple[Any, ...], rule: Any) -> Rule:
    try:
        return scope.resolve(rule)
    except ConfigError as error:
        raise ConfigError(f"sharding{f' at {path_text(keys)!r}' if keys else ''}: {error}") from None


def _is_open(rule: Any) -> bool:
    """Whether a rule names no devices, so that it needs a mesh from elsewhere."""
    return rule is None or isinstance(rule, PartitionSpec)


def companion_sharding(fixed: Sequence[Rule], alone: _Scope, rules: list[Any]) -> Sharding | None:
    """The sharding from which the open rules of a tree take their devices: that of a rule which names devices."""
    placed = sorted((rule for rule in fixed if isinstance(rule, Sharding)), key=lambda rule: not isinstance(rule, NamedSharding))
    asked = any(rule is None or (alone.in_force is None and _is_open(rule)) for rule in rules)
    if asked and any(devices_of(rule) != devices_of(placed[0]) for rule in placed):
        raise ConfigError(
            "sharding has rules over different devices, so that None and bare specs in it are ambiguous: use NamedSharding there"
        )
    return placed[0] if placed else None


def _is_rule(node: Any) -> bool:
    # PartitionSpec has been a tuple in some versions of JAX; functools.partial covers jax.tree_util.Partial, a pytree
    return node is None or isinstance(node, PartitionSpec | Sharding | Mesh | functools.partial)


def _hint(rule: Any) -> str:
    if isinstance(rule, str):
        return f"write PartitionSpec({rule!r})"
    if hasattr(rule, "platform") and hasattr(rule, "id"):
        return "for one device pass jax.sharding.SingleDeviceSharding(device)"
    return f"pass {FORMS}"


def _mesh_over_all(axis: Any) -> Mesh:
    return Mesh(np.array(devices()), (axis,))


def _flatten(part: Any) -> tuple[list[Any], TreeDef]:
    try:
        return tree_flatten(part)
    except (ValueError, TypeError) as error:
        raise PlacementError(f"JAX cannot take the batch apart: {_unsortable(part) or error}") from error


def _unsortable(part: Any) -> str | None:
    """An error text for the first dict in `part` whose keys cannot be sorted; None if there is none."""
    if isinstance(part, dict):
        try:
            sorted(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        except TypeError:
            return f"a dict has the keys {list(part)}, and JAX sorts keys: make them of one type, or keep the dict on the host (ps.HOST)"  # pyright: ignore[reportUnknownArgumentType]
        part = list(part.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return next(filter(None, map(_unsortable, part)), None) if isinstance(part, list | tuple) else None  # pyright: ignore[reportUnknownArgumentType]


def _ask(rule: Any, scope: _Scope, path: str, shape: Shape, dtype: Any) -> Placed:
    try:
        answer = scope.resolve(rule(path, shape, dtype))
    except ConfigError as error:
        raise PlacementError(f"leaf {path or '(the batch itself)'}: the sharding callable gave what cannot be used: {error}") from error
    if isinstance(answer, Sharding) or answer is HOST:
        return answer
    raise PlacementError(f"leaf {path or '(the batch itself)'}: the sharding callable gave a callable, {answer!r}")


def _rule_text(rule: Rule) -> str:
    return sharding_text(rule) if isinstance(rule, Sharding) else repr(rule)
