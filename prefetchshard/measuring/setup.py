"""How a loader was made, as far as advice depends on it."""

from __future__ import annotations

import msgspec


class Setup(msgspec.Struct, frozen=True):
    """How a loader was made.

    Attributes:
        source: its kind, in a word or two.
        is_numbered: rows are found by number, so that all workers read; else one thread pulls.
        is_memory: it is arrays.
        workers: reader threads.
        processes: worker processes; 0 where threads do the work.
        has_functions: there is a `transform` or a `collate`.
        reuses_buffers: as the argument.
        depth_could_grow: with `depth="auto"` more batches could be kept ready.
        cpus: that this process may use.
        platform: of the devices.
        leaves: of a batch, on the devices; 0 where not known yet.
        wide_share: of a batch's bytes those in float32 and wider, 0.0 to 1.0.
    """

    source: str = "source"
    is_numbered: bool = False
    is_memory: bool = False
    workers: int = 1
    processes: int = 0
    has_functions: bool = False
    reuses_buffers: bool = True
    depth_could_grow: bool = True
    cpus: int = 1
    platform: str = "cpu"
    leaves: int = 0
    wide_share: float = 0.0
