"""Where batches go: all devices, the rows split over them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Place:
    """The devices of a run, and the sharding of its batches."""

    def __init__(self, count: int) -> None:
        self.devices = jax.devices()[:count]
        self.platform = self.devices[0].platform
        self.mesh = Mesh(np.array(self.devices), ("data",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec("data"))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    def put(self, batch: Any) -> Any:
        """What a user writes: one call for the whole batch."""
        return jax.device_put(batch, self.sharding)


def use_devices(count: int | None) -> None:
    """Before anything else of JAX: as many virtual CPU devices as asked for; accelerators are there or not."""
    jax.config.update("jax_num_cpu_devices", count or 8)
