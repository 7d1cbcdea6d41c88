"""The tree structure of a batch: its containers, a readable path for each leaf, and the rule of `sharding=` that applies to each leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from prefetchshard.base.cycles import root_only
from prefetchshard.base.errors import PlacementError
from prefetchshard.base.jax_types import TreeDef, tree_flatten_with_path, tree_structure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


LEAF = tree_structure(0)
"""The structure of a single leaf. A part of a batch that stays on the host counts as one leaf, whatever it holds."""


class BatchTree:
    """The containers of a batch, without its leaves.

    Two batches of one loader with equal trees have the same leaves in the same order.

    Attributes:
        tree: as JAX sees it. A part that stays on the host is one leaf, as is a list of numbers.
        paths: the path of each leaf, such as `image`, `meta.name`, `[0].x`; empty for a batch that is a single leaf.
        named: for each leaf, whether its rule was written for the leaf itself rather than for a container above it.
        rules: for each leaf, the index of its rule.

    Thread safety: immutable.
    """

    __slots__ = ("named", "paths", "rules", "tree")

    def __init__(self, tree: TreeDef, *, paths: tuple[str, ...], named: tuple[bool, ...], rules: tuple[int, ...]) -> None:
        self.tree = tree
        self.paths = paths
        self.named = named
        self.rules = rules

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """A batch of this structure from new leaves, in the order of `paths`."""
        return self.tree.unflatten(leaves)

    def __len__(self) -> int:
        return len(self.paths)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, BatchTree) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"BatchTree({', '.join(path or '(the batch itself)' for path in self.paths)})"


def leaf_paths(node: Any, above: tuple[Any, ...] = ()) -> list[str]:
    """The path of each leaf of `node`, prefixed with the keys that lead to `node`."""
    return [path_text((*above, *keys)) for keys, _ in tree_flatten_with_path(node)[0]]


def in_brackets(paths: Sequence[str]) -> str:
    """Leaf paths for an error message: ` (image, label)`; empty for a batch that is a single leaf."""
    named = [path for path in paths if path]
    return f" ({', '.join(named[:8])}{', ...' if len(named) > 8 else ''})" if named else ""


def path_text(keys: Sequence[Any]) -> str:
    """The keys of a JAX tree path in readable form: `meta.name`, `[0].x`."""
    return "".join(_key_text(key, first=i == 0) for i, key in enumerate(keys))


def _key_text(key: Any, *, first: bool) -> str:
    if isinstance(key, GetAttrKey):
        return key.name if first else f".{key.name}"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, DictKey | FlattenedIndexKey):
        return _dict_key_text(key.key, first=first)
    return str(key)


def _dict_key_text(key: Any, *, first: bool) -> str:
    if isinstance(key, str) and key and not set(key) & set(".[]"):
        return key if first else f".{key}"
    return f"[{key!r}]"


def mismatch(rules: Any, batch: Any, is_rule: Callable[[Any], bool]) -> PlacementError | None:
    """The error that says where the structures of rules and batch differ; None if they do not."""
    difference = next(_differences(rules, batch, is_rule, ()), None)
    return None if difference is None else PlacementError(f"sharding and batch differ in structure: {difference}")


def _differences(rules: Any, batch: Any, is_rule: Callable[[Any], bool], path: tuple[Any, ...]) -> Iterator[str]:
    if is_rule(rules):
        return
    where = f" at {path_text(path)!r}" if path else ""
    if type(rules) is not type(batch):
        yield f"sharding has {_kind(rules)}{where}, the batch {_kind(batch)}"
        return
    ours, theirs = _children(rules), _children(batch)
    yield from (f"sharding has no entry for {path_text((*path, *key))!r}" for key in theirs if key not in ours)
    yield from (f"sharding has an entry for {path_text((*path, *key))!r}, the batch has none" for key in ours if key not in theirs)
    for key, rule in ours.items():
        yield from _differences(rule, theirs[key], is_rule, (*path, *key))
    if _one_level(rules) != _one_level(batch):
        yield f"the {type(batch).__name__}{where or ' itself'} differs in what it holds beside its leaves"


def _one_level(node: Any) -> TreeDef:
    return tree_structure(node, is_leaf=root_only())


def _children(node: Any) -> dict[tuple[Any, ...], Any]:
    return dict(tree_flatten_with_path(node, is_leaf=root_only())[0])


def _kind(node: Any) -> str:
    if node is None:
        return "None"
    shape: Any = getattr(node, "shape", None)
    if isinstance(shape, tuple):
        return f"an array of shape {shape}"
    name = type(node).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
