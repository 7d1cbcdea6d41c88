"""`host=`: leaves that stay on the host, named by their paths."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from prefetchshard.base.codec import shown
from prefetchshard.base.config import HOST
from prefetchshard.base.errors import ConfigError
from prefetchshard.sharding.batch_tree import path_text


def paths_of(host: Any) -> tuple[str, ...]:
    """The paths in `host=`; a single string is one path.

    Raises:
        ConfigError: it is something else.
    """
    if host is None:
        return ()
    if isinstance(host, str):
        return (host,)
    several = isinstance(host, list | tuple | set | frozenset)
    paths: list[Any] = list(cast("Collection[Any]", host)) if several else [host]
    odd = [path for path in paths if not isinstance(path, str)]
    if odd:
        raise ConfigError(f"host={shown(host)}: paths of leaves as strings, such as host=('text', 'meta.id'), and {shown(odd[0])} is none")
    return tuple(dict.fromkeys(paths))


def check_rules(host: Sequence[str], rules: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
    """Whether `sharding=` says nothing else for a leaf that `host=` names.

    Raises:
        ConfigError: it has a rule for the leaf itself, or for one below it.
    """
    for keys, rule in rules:
        if rule is None or rule is HOST:
            continue
        for length in range(len(keys) + 1):
            path = path_text(keys[:length])
            if path in host:
                where = repr(path_text(keys)) if keys else "the batch itself"
                raise ConfigError(f"host= names {path!r}, and sharding= has a rule for {where}, {rule!r}: leave it out of one of them")


def check_found(host: Sequence[str], found: Collection[str], paths: Sequence[str]) -> None:
    """Whether the batch has each path.

    Args:
        host: the paths.
        found: those that the batch has.
        paths: of the leaves of the batch.

    Raises:
        ConfigError: it lacks one; names it and the paths that there are.
    """
    for path in host:
        if path not in found:
            near = difflib.get_close_matches(path, paths, n=1)
            there = ", ".join(map(repr, paths[:16])) + (", ..." if len(paths) > 16 else "")
            raise ConfigError(
                f"host= names {path!r}, and the batch has no such leaf{f' (did you mean {near[0]!r}?)' if near else ''}; its leaves are {there}"
            )
