"""The nouns that travel: where a batch stands in the data, what it looks like, and its two states, on the host and placed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchshard.base.waiters import Waiters

AnyArray = NDArray[Any]
P = TypeVar("P")


class EpochEnd:
    """Whether a batch is the last of its epoch: known at once where the length is, else when the source was asked for the next.

    Args:
        known: it, where it is known.
        home_thread: the thread whose event loop the source is pulled in, and which must not wait for it.
    """

    __slots__ = ("_home_thread", "_known", "_waiters")

    def __init__(self, known: bool | None = None, home_thread: int | None = None) -> None:
        self._known = known
        self._home_thread = home_thread
        self._waiters = Waiters()

    def settle(self, ends: bool) -> None:
        """Say it; the first word stands."""
        if self._known is None:
            self._known = ends
            self._waiters.wake()

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def wait(self) -> bool:
        """Wait until it is known.

        Raises:
            RuntimeError: this is the thread that must not wait.
        """
        if self._known is None and self._home_thread == threading.get_ident():
            raise RuntimeError(
                "whether this batch ends its epoch is not known before the source was asked for the next item, and the source is pulled in "
                "the event loop of this thread (ps.from_this_loop), which would be blocked: look at `end_is_known` first, or ask in "
                "another thread"
            )
        self._waiters.wait(lambda: self._known is not None)
        return bool(self._known)


class Position:
    """Where a batch stands in the data.

    Attributes:
        run: the number of the run, from 0.
        epoch: the epoch that the batch is of, from 0, counted over all runs.
        step: batches before this one, over all epochs and runs.
        first_row: rows of the epoch before this batch.
        rows: rows of the epoch up to and including this batch.
        batches: batches of the epoch up to and including this one.
        batch_rows: rows of the first batch of the run, where the source or `collate` makes the batches.
        snapshot: the source's own state as it was after this batch or one before it, packed.
        since_snapshot: items that were pulled after the snapshot, up to the end of this batch.
        sample: a hash over some bytes of the batch, where nothing but reading again leads back here.
    """

    __slots__ = (
        "_end", "batch_rows", "batches", "epoch", "first_row", "rows", "run", "sample", "since_snapshot", "snapshot", "step"
    )  # fmt: skip

    def __init__(self, *, run: int, epoch: int, step: int, first_row: int, rows: int, batches: int, end: EpochEnd) -> None:
        self.run = run
        self.epoch = epoch
        self.step = step
        self.first_row = first_row
        self.rows = rows
        self.batches = batches
        self.batch_rows: int | None = None
        self.snapshot: bytes | None = None
        self.since_snapshot = 0
        self.sample: bytes | None = None
        self._end = end

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch.

        Over a source of unknown length this waits until the source was asked for the item after it; `end_is_known` says whether it
        has to.
        """
        return self._end.wait()

    @property
    def end_is_known(self) -> bool:
        return self._end.is_known

    def settle_end(self, ends: bool) -> None:
        """Say whether this batch ends its epoch (the readers do, once they know)."""
        self._end.settle(ends)

    def __repr__(self) -> str:
        return f"Position(run={self.run}, epoch={self.epoch}, step={self.step}, rows={self.rows}, batches={self.batches})"


class LeafSpec(msgspec.Struct, frozen=True):
    """One leaf of a batch.

    Attributes:
        path: where it is in the batch, e.g. `meta.name`; empty for a batch that is one array.
        shape: global, `(rows, *example)`, or `(microbatches, rows / microbatches, *example)`.
        dtype: on the devices.
        sharding: a `jax.sharding.Sharding`, or `ps.HOST`.
        bytes_per_device: what one device holds of it.

    Example:
        spec = ps.Loader({"x": np.zeros((64, 3), np.float32)}, P("data"), batch_size=16).spec()
        assert spec["x"].shape == (16, 3)
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    bytes_per_device: int


class BatchSpec(Mapping[str, LeafSpec]):
    """What the batches of a loader look like: a mapping from path to `LeafSpec`.

    Attributes:
        ahead: the most batches that are ever pulled from the source and not yet delivered.
        bytes_per_device: what one device holds of one batch.

    Example:
        spec = ps.Loader({"x": np.zeros((64, 3), np.float32)}, P("data"), batch_size=16).spec()
        assert list(spec) == ["x"]
        print(spec.bytes_per_device, spec)
    """

    def __init__(self, leaves: tuple[LeafSpec, ...], ahead: int) -> None:
        self._leaves = {leaf.path: leaf for leaf in leaves}
        self.ahead = ahead

    @property
    def bytes_per_device(self) -> int:
        return sum(leaf.bytes_per_device for leaf in self._leaves.values())

    def __getitem__(self, path: str) -> LeafSpec:
        return self._leaves[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        lines = [
            f"  {leaf.path or '(the batch itself)'}: {leaf.dtype}{list(leaf.shape)}, {leaf.sharding}, {leaf.bytes_per_device:,} bytes a device"
            for leaf in self._leaves.values()
        ]
        return "\n".join([f"BatchSpec: {self.bytes_per_device:,} bytes a device, at most {self.ahead} batches ahead", *lines])


class Memory(Protocol):
    """The host memory of one batch, from the staging ring.

    Attributes:
        views: one a leaf.
        slab: the bytes in which the small leaves lie side by side.
    """

    views: tuple[AnyArray, ...]
    slab: AnyArray | None

    def release(self) -> None:
        """The transfer out of it is ready, or will never be made."""
        ...


class HostBatch(Generic[P]):
    """A batch on the host, on its way to the transfer.

    Attributes:
        plan: how it is placed and put together again.
        memory: of the leaves that are staged; None where there are none.
        passed: leaves that are not staged, by index: jax.Arrays, lists of keys, and what stays on the host.
        position: where it stands in the data.
        rows: in it, padding not counted; 0 where its leaves have none in common.
    """

    __slots__ = ("memory", "passed", "plan", "position", "rows")

    def __init__(self, plan: P, memory: Memory | None, passed: dict[int, Any], position: Position, rows: int) -> None:
        self.plan = plan
        self.memory = memory
        self.passed = passed
        self.position = position
        self.rows = rows


class PlacedBatch:
    """A batch whose transfer was dispatched.

    Attributes:
        batch: what the consumer gets; `jax.Array` leaves may still be on their way.
        position: where it stands in the data.
        dispatched_at: when the transfer was dispatched, seconds of the run's clock.
        ready_at: when the raw transfer was done; 0.0 before.
        bytes: of its leaves that were transferred, each counted once.
        rows: in it, padding not counted.
        spec: what the transfer was told to make.
        finish: makes the batch, where the thread that takes it has to; None where it is made.
    """

    __slots__ = ("_finishing", "batch", "bytes", "dispatched_at", "finish", "position", "ready_at", "rows", "spec")

    def __init__(
        self, batch: Any, position: Position, dispatched_at: float, nbytes: int, rows: int, spec: Callable[[], tuple[LeafSpec, ...]]
    ) -> None:
        self.batch = batch
        self.spec = spec
        self.rows = rows
        self.position = position
        self.dispatched_at = dispatched_at
        self.ready_at = 0.0
        self.bytes = nbytes
        self.finish: Callable[[], Any] | None = None
        self._finishing: Any = None

    def finish_by(self, finish: Callable[[], Any]) -> None:
        """Leave the making of the batch to the thread that takes it."""
        self._finishing = threading.RLock()  # one thread may look at what another one takes
        self.finish = finish

    def finished(self) -> Any:
        """The batch, made now where it is not yet."""
        if self.finish is not None and self._finishing is not None:
            with self._finishing:
                finish = self.finish
                if finish is not None:
                    self.batch = finish()
                    self.finish = None
        return self.batch
