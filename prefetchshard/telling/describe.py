"""A batch, told and drawn: what its leaves are, and which device holds which part of them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from prefetchshard.base.jax_types import device_count, process_index, tree_flatten_with_path
from prefetchshard.leaves.on_devices import is_jax_array, is_traced
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sharding.meshes import devices_of, index_map, sharding_text, spec_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH = 100
MOST_LEAVES = 40
MOST_LINES = 16

Part = tuple[tuple[int, int, int], ...]
"""What of a leaf: axis, start and stop, for each axis that is split."""


class _Placement(NamedTuple):
    parts: dict[Part, list[Any]]
    sharding: Any
    paths: list[str]


class _Leaf(NamedTuple):
    path: str
    value: Any

    @property
    def placed(self) -> bool:
        return is_jax_array(self.value) and not is_traced(self.value)


class Text(str):
    """Lines that a notebook shows as they are printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(batch: Any) -> str:
    """What a batch is made of and where it lies, to be printed, or to be the last line of a notebook's cell.

    A line a leaf says path, shape, dtype, bytes on one device and sharding; then each placement is drawn once, for all leaves
    that have it.

    Args:
        batch: any pytree of jax.Arrays, NumPy arrays and other values.

    Returns:
        Lines of at most 100 characters.

    Example:
        (batch,) = ps.prefetch([{"x": np.zeros((8, 3), np.float32)}], P("data"))
        print(ps.describe(batch))
    """
    found = tree_flatten_with_path(batch, is_leaf=_is_list_of_values)[0]
    leaves = [_Leaf(path_text(keys) or "(the batch itself)", value) for keys, value in found]
    if not leaves:
        return Text("a batch without leaves")
    placements = _placements(leaves)
    lines = [_summary(leaves), "", *_table(leaves, placements)]
    for number, placement in enumerate(placements.values(), 1):
        paths = _several([_cut(path, 30) for path in placement.paths])
        lines += ["", _cut(f"[{number}] {paths}: {sharding_text(placement.sharding)}"), *_drawing(placement.parts)]
    return Text("\n".join(line.rstrip() for line in lines))


def _is_list_of_values(node: Any) -> bool:
    values: Any = node
    return type(node) is list and len(values) > 0 and all(isinstance(value, str | bytes | int | float) for value in values)


def _summary(leaves: list[_Leaf]) -> str:
    count = f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}"
    held: Counter[Any] = Counter()
    for leaf in leaves:
        if leaf.placed:
            held.update(dict.fromkeys(devices_of(leaf.value.sharding), _bytes_per_device(leaf.value)))
    if not held:
        return f"{count}, all on the host"
    platform = next(iter(held)).platform
    here = sum(device.process_index == process_index() for device in held)
    own = f" ({here} of this process)" if here < len(held) else ""
    return f"{count} on {len(held)} {platform} {'device' if len(held) == 1 else 'devices'}{own}, {_bytes_text(max(held.values()))} a device"


def _placements(leaves: list[_Leaf]) -> dict[Any, _Placement]:
    """Each way in which leaves lie on devices."""
    found: dict[Any, _Placement] = {}
    for leaf in leaves:
        if leaf.placed:
            parts = _parts(leaf.value)
            found.setdefault(_key(parts), _Placement(parts, leaf.value.sharding, [])).paths.append(leaf.path)
    return found


def _key(parts: dict[Part, list[Any]]) -> Any:
    return frozenset((part, tuple(device.id for device in devices)) for part, devices in parts.items())


def _parts(array: Any) -> dict[Part, list[Any]]:
    """The devices that hold each distinct part of an array."""
    indices: dict[Any, list[tuple[int, int]]] = {
        device: [piece.indices(size)[:2] for piece, size in zip(index, array.shape, strict=True)]
        for device, index in index_map(array.sharding, array.shape).items()
    }
    split = [axis for axis in range(array.ndim) if len({ends[axis] for ends in indices.values()}) > 1]
    parts: dict[Part, list[Any]] = {}
    for device, ends in sorted(indices.items(), key=lambda item: item[0].id):
        parts.setdefault(tuple((axis, *ends[axis]) for axis in split), []).append(device)
    return dict(sorted(parts.items(), key=lambda item: item[0]))


def _table(leaves: list[_Leaf], placements: dict[Any, _Placement]) -> Iterator[str]:
    numbers = {path: number for number, placement in enumerate(placements.values(), 1) for path in placement.paths}
    rows = [("leaf", "shape", "dtype", "a device", "placed")]
    rows += [_row(leaf, numbers.get(leaf.path)) for leaf in leaves[:MOST_LEAVES]]
    yield from _columns(rows, [30, 22, 12, 10, WIDTH])
    if len(leaves) > MOST_LEAVES:
        yield f"... and {len(leaves) - MOST_LEAVES} more leaves"


def _row(leaf: _Leaf, number: int | None) -> tuple[str, str, str, str, str]:
    value = leaf.value
    if leaf.placed:
        sharding = value.sharding
        where = spec_text(sharding.spec) if isinstance(sharding, NamedSharding) else sharding_text(sharding)
        return (leaf.path, str(value.shape), str(value.dtype), _bytes_text(_bytes_per_device(value)), f"[{number}] {where}")
    if is_jax_array(value):
        return (leaf.path, str(value.shape), str(value.dtype), "", "traced, nowhere yet")
    if _is_numpy(value):
        return (leaf.path, str(value.shape), str(value.dtype), "", "host")
    length = f" of {len(value)}" if _is_list_of_values(value) else ""
    return (leaf.path, "", f"{type(value).__name__}{length}", "", "host")


def _is_numpy(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _columns(rows: Sequence[Sequence[str]], widest: Sequence[int]) -> Iterator[str]:
    texts = [[_cut(text, most) for text, most in zip(row, widest, strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        yield _cut("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _drawing(parts: dict[Part, list[Any]]) -> Iterator[str]:
    """A grid: the last axis that is split runs to the right, the others down."""
    if len(parts) == 1:
        (devices,) = parts.values()
        yield f"    {_holders(devices)} {'holds' if len(devices) == 1 else 'hold'} all of it"
        return
    down = list(dict.fromkeys(part[: max(1, len(part) - 1)] for part in parts))
    right = list(dict.fromkeys(part[1:][-1:] for part in parts))
    cells = [["", *map(_part_text, right)]]
    cells += [[_part_text(above), *(_holders(parts.get((*above, *beside), [])) for beside in right)] for above in down]
    yield from ("    " + line for line in _grid(cells))


def _grid(cells: list[list[str]]) -> Iterator[str]:
    """Cells in columns; what does not fit is left out, and that is said."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    shown = _fitting(widths, WIDTH - 4)
    if not any(cells[0]):
        cells = cells[1:]
    for row in _few(cells, MOST_LINES, lambda left_out: [f"... {left_out} more"] + [""] * (len(widths) - 1)):
        texts = [row[column].ljust(widths[column]) if column >= 0 else "..." for column in shown]
        yield " | ".join(texts)


def _fitting(widths: list[int], room: int) -> list[int]:
    """The columns that fit, the last one always among them; -1 stands for those left out."""
    columns = list(range(len(widths)))
    if sum(widths) + 3 * (len(widths) - 1) <= room:
        return columns
    room -= widths[0] + widths[-1] + 9  # and the mark for what is left out
    shown = [0]
    for column in columns[1:-1]:
        room -= widths[column] + 3
        if room < 0:
            break
        shown.append(column)
    return [*shown, -1, columns[-1]]


def _few(rows: list[list[str]], most: int, mark: Callable[[int], list[str]]) -> list[list[str]]:
    if len(rows) <= most:
        return rows
    return [*rows[: most - 2], mark(len(rows) - most + 1), rows[-1]]


def _part_text(part: Part) -> str:
    return ", ".join(f"{'rows' if axis == 0 else f'axis {axis}'} {start}:{stop}" for axis, start, stop in part)


def _holders(devices: list[Any]) -> str:
    if not devices:
        return "-"
    ids = [device.id for device in devices]
    if len(ids) == device_count() > 1:
        return f"all {len(ids)} devices"
    return f"{'device' if len(ids) == 1 else 'devices'} {_several(_runs(ids), f' ({len(ids)} in all)')}"


def _runs(ids: list[int]) -> list[str]:
    """Numbers that follow each other as `4-7`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]


def _several(texts: list[str], count: str | None = None, most: int = 4) -> str:
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])}, ...{f' ({len(texts)} in all)' if count is None else count}"


def _bytes_per_device(array: Any) -> int:
    return array.nbytes * math.prod(array.sharding.shard_shape(array.shape)) // array.size if array.size else 0


def _bytes_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _cut(text: str, most: int = WIDTH) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
