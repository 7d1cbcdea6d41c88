"""Many small leaves travel as one buffer and are cut up on the devices by one jitted function.

A transfer costs the same for a few kilobytes as for one byte, so forty small leaves cost forty times what they need. They lie side by
side in the staging slab anyway: the slab goes to every device as it is (it is small), and each device takes its own part of each leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from prefetchshard.base.jax_types import jit, reshape, with_sharding_constraint
from prefetchshard.sharding.leaf_sharding import replicated_like
from prefetchshard.sharding.meshes import devices_of
from prefetchshard.staging.layout import Layout

LEAST_LEAVES = {"gpu": 8, "tpu": 8}
"""From so many small leaves on it pays, by platform. Not on the CPU backend, where a transfer is no more than a few references and
compiling the function would only delay the first batch."""

MOST_BYTES = 1 << 20
"""Above it, sending all of it to every device would cost more than it saves."""


class Packing:
    """The small leaves of a plan, as one buffer.

    Attributes:
        places: which of the arrays of the plan come out of it, in this order.
        others: which of them are put by themselves.
        sharding: of the buffer: whole, on every device.
    """

    def __init__(self, layout: Layout, places: Sequence[int], shapes: Sequence[Any], shardings: Sequence[Any]) -> None:
        self.places = tuple(places)
        self.others = tuple(n for n in range(len(shapes)) if n not in self.places)
        self.sharding = replicated_like(shardings[self.places[0]])
        cuts = [(layout.leaves[n][3] or 0, layout.leaves[n][2], layout.leaves[n][1], shapes[n]) for n in self.places]

        def unpack(slab: Any) -> list[Any]:
            # Whole on every device until the end: else XLA carries the split back to the slab, and the devices exchange pieces of it
            return [with_sharding_constraint(_cut(slab, *cut), self.sharding) for cut in cuts]

        self.unpack = jit(unpack, out_shardings=[shardings[n] for n in self.places])


def find_packing(layout: Layout, shapes: Sequence[Any], shardings: Sequence[Any]) -> Packing | None:
    """How the small leaves of a batch are packed, or None where sending them one by one is better.

    Args:
        layout: of the staging memory.
        shapes: in which the arrays are put, those in staging memory first.
        shardings: where they go.
    """
    places = [n for n, (_, dtype, size, offset) in enumerate(layout.leaves) if offset is not None and size and _is_packable(dtype)]
    small = [n for n, leaf in enumerate(layout.leaves) if leaf[3] is not None]
    if not places or len(places) != len(small) or layout.slab_bytes > MOST_BYTES:
        return None
    first = shardings[places[0]]
    least = LEAST_LEAVES.get(devices_of(first)[0].platform)
    if least is None or len(places) < least:
        return None
    if not all(_goes_with(first, shardings[n]) for n in places):
        return None
    return Packing(layout, places, shapes, shardings)


def _goes_with(first: Any, sharding: Any) -> bool:
    """Whether one function can make arrays of both: it has one order of devices."""
    if sharding.memory_kind not in (None, "device") or not sharding.is_fully_addressable:
        return False
    meshes = [one.mesh for one in (first, sharding) if isinstance(one, NamedSharding)]
    if len(meshes) == 2:
        return meshes[0] == meshes[1]
    return len(devices_of(sharding)) == 1 and devices_of(first) == devices_of(sharding)


def _is_packable(dtype: np.dtype[Any]) -> bool:
    """Whether its bytes can be cut out bit by bit. Types of less than a byte fill a byte each on the host, but not on devices."""
    if dtype.kind in "biufc":
        return True
    return dtype.name in ("bfloat16", "int4", "uint4") or dtype.name.startswith("float8")


def _cut(slab: Any, start: int, size: int, dtype: np.dtype[Any], shape: Any) -> Any:
    raw = jax.lax.slice(slab, (start,), (start + size,))
    if dtype.kind == "b":
        return reshape(raw, shape) != 0
    if dtype.kind == "c":
        half = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
        parts = _cut(slab, start, size, half, (*shape, 2))
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if dtype.name == "uint4":
        return reshape(raw, shape).astype(dtype)
    if dtype.name == "int4":
        return jax.lax.bitcast_convert_type(reshape(raw, shape), np.int8).astype(dtype)
    if dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(reshape(raw, shape), dtype)
    return jax.lax.bitcast_convert_type(reshape(raw, (*shape, dtype.itemsize)), dtype)
