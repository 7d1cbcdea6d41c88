"""What a device tells of its memory."""

from __future__ import annotations

import contextlib

from prefetchshard.base.jax_types import Device


def memory_told(device: Device) -> dict[str, int]:
    """Bytes by JAX's names, such as `bytes_limit` and `bytes_in_use`; without what the device does not tell, so empty on the CPU backend."""
    told: dict[str, int] | None = None
    with contextlib.suppress(Exception):  # JAX raises for devices of other processes, and some runtimes do for all
        told = device.memory_stats()
    return {name: figure for name, figure in (told or {}).items() if figure >= 0}  # -1: the backend does not tell it
