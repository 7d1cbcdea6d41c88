"""Fakes for tests: a manual clock, and staging memory that is overwritten with poison as soon as it is released."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias
from unittest import mock

import msgspec
import numpy as np

from prefetchshard.base.jax_types import devices
from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.building import run_factory as building
from prefetchshard.staging.layout import ALIGNMENT, Layout, Staging, StagingStats, aligned_bytes, nbytes_of

MakeStaging: TypeAlias = Callable[[Any, int], Staging]
"""Makes a ring for one of the devices and a number of slots."""

POISON = 0xA5
"""The byte that fills a free slot. Repeated, it is an unlikely value of any integer or float dtype."""

MOST_LAYOUTS = 64


class ManualClock:
    """A clock in seconds that advances only when a test says so.

    Thread safety: every method may be called from any thread.

    Example:
        clock = ps.testing.ManualClock()
        clock.advance(2.5)
        assert clock() == 2.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # guards _seconds

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> float:
        """Advance the time. Returns the new time.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not run backwards")
        with self._lock:
            self._seconds += seconds
            return self._seconds


class SlotMisuseError(AssertionError):
    """Staging memory was used outside its lease.

    What to do: release staging memory once, when the transfer out of it is done, and do not touch it afterwards.
    """


class PoisonCounts(msgspec.Struct, frozen=True):
    """The counts of a `PoisonStaging`.

    Attributes:
        leased: leases so far.
        released: leases that were released.
        dropped: leases that were garbage-collected without a release (runs that were closed).
        out: leases that are active now.
        not_reused: pieces of memory that could not be misaligned at every split, and so were used only once.

    Example:
        with ps.testing.poisoned_staging() as rings:
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
        assert rings[0].check().out == 0
    """

    leased: int
    released: int
    dropped: int
    out: int
    not_reused: int


class PoisonStaging:
    """A staging ring for the CPU backend that behaves like the page-locked one on an accelerator, and detects misuse.

    Its slots are misaligned, so the CPU backend copies them instead of aliasing them, and copies large ones only after `device_put` has
    returned. A slot is overwritten with poison as soon as it is released, so a release before the copy puts poison into the batch. The
    slot released last is reused first. If its poison has changed by then, somebody wrote to it after its release.

    Args:
        capacity: number of free slots to keep.
        pieces: the most pieces into which a leaf is split; None: the number of devices.

    Raises:
        SlotMisuseError: from `lease` and `check`, and if memory is released twice.

    Thread safety: every method may be called from any thread.

    Example:
        ring = ps.testing.PoisonStaging(capacity=4)
        with ps.testing.staging_by(lambda device, capacity: ring):
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
        ring.check()
    """

    def __init__(self, capacity: int, *, pieces: int | None = None) -> None:
        self._capacity = capacity
        self._pieces = pieces or len(devices())
        self._lock = threading.Lock()  # guards the fields below but _back; never taken by a lease's finaliser
        self._free: list[_PoisonedSlot] = []
        self._places: dict[int, _Places] = {}
        self._made = self._reused = self._leased = self._released = self._dropped = self._not_reused = 0
        self._back: queue.SimpleQueue[tuple[_PoisonedSlot, bool]] = queue.SimpleQueue()

    def lease(self, layout: Layout) -> Memory:
        with self._lock:
            self._collect()
            places = self._places_of(layout)
            fits = [i for i, slot in enumerate(self._free) if places.nbytes <= len(slot.memory) <= 2 * places.nbytes + ALIGNMENT]
            if fits:
                slot = self._free.pop(fits[-1])
                self._reused += 1
            else:
                slot = _PoisonedSlot(places.nbytes)
                self._made += 1
            self._leased += 1
            self._not_reused += places.not_reused
        slot.take()
        return _PoisonLease(slot, places, self._back)

    def _places_of(self, layout: Layout) -> _Places:
        places = self._places.get(id(layout))
        if places is None or places.layout is not layout:
            places = self._places[id(layout)] = _Places(layout, self._pieces)
            while len(self._places) > MOST_LAYOUTS:
                del self._places[next(iter(self._places))]
        return places

    def _collect(self) -> None:
        """Take back the slots that were returned since the last call. The caller holds the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                slot, released = self._back.get_nowait()
                self._released += released
                self._dropped += not released
                self._free.append(slot)
        while len(self._free) > self._capacity:
            self._free.pop(0).check()

    def check(self) -> PoisonCounts:
        """Check the free slots, and return the counts.

        Raises:
            SlotMisuseError: a free slot was written to.
        """
        with self._lock:
            self._collect()
            for slot in self._free:
                slot.check()
            out = self._leased - self._released - self._dropped
            return PoisonCounts(self._leased, self._released, self._dropped, out, self._not_reused)

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._made, self._reused, sum(slot.memory.nbytes for slot in self._free))


class _PoisonedSlot:
    __slots__ = ("is_out", "memory")

    def __init__(self, nbytes: int) -> None:
        self.memory = aligned_bytes(nbytes)
        self.memory.fill(POISON)
        self.is_out = False

    def take(self) -> None:
        if self.is_out:
            raise SlotMisuseError("a slot was leased while it is still on loan")
        self.is_out = True
        self.check()

    def check(self) -> None:
        if self.memory.min(initial=POISON) == POISON == self.memory.max(initial=POISON):
            return
        written = np.flatnonzero(self.memory != POISON)
        raise SlotMisuseError(
            f"a slot was written to after it had been released: {len(written)} bytes, from byte {written[0]} to byte {written[-1]}"
        )

    def give_back(self) -> None:
        self.memory.fill(POISON)
        self.is_out = False


class _PoisonLease:
    """A slot on loan. Its finaliser returns it to the ring if it was not released (a run that was closed)."""

    __slots__ = ("_back", "_slot", "slab", "views")

    def __init__(self, slot: _PoisonedSlot, places: _Places, back: queue.SimpleQueue[tuple[_PoisonedSlot, bool]]) -> None:
        self._slot: _PoisonedSlot | None = slot
        self._back = back
        self.views, self.slab = places.views(slot.memory)

    def lock(self) -> None:
        """Nothing is to be done: no device reads this memory by itself."""

    def release(self) -> None:
        """Return the slot: the transfer out of it is done, or will never be made.

        Raises:
            SlotMisuseError: it was released before.
        """
        if self._slot is None:
            raise SlotMisuseError("memory was released twice")
        self._give_back(released=True)

    def _give_back(self, *, released: bool) -> None:
        slot, self._slot = self._slot, None
        self.views = ()
        self.slab = None
        if slot is not None:
            slot.give_back()
            self._back.put((slot, released))

    def __del__(self) -> None:
        self._give_back(released=False)


class _Places:
    """The offsets of a layout's leaves in a slot, chosen so that the CPU backend aliases no piece of a leaf.

    A leaf for which there is no such offset gets memory of its own, which is used only once, as a batch may keep an alias of it.
    """

    def __init__(self, layout: Layout, pieces: int) -> None:
        self.layout = layout
        self.not_reused = 0
        small = [(size, dtype) for _, dtype, size, offset in layout.leaves if offset is not None]
        self._end = 0
        self._slab = self._place(layout.slab_bytes, _shift([(layout.slab_bytes, np.dtype(np.uint8)), *small], pieces))
        self._large = [
            self._place(size, _shift([(size, dtype)], pieces)) if offset is None else None for _, dtype, size, offset in layout.leaves
        ]
        self.nbytes = self._end

    def _place(self, size: int, shift: int | None) -> int | None:
        """The offset of a piece of memory, or None."""
        if shift is None:
            self.not_reused += 1
            return None
        start = self._end + shift
        self._end = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        return start

    def views(self, memory: AnyArray) -> tuple[tuple[AnyArray, ...], AnyArray]:
        slab = _piece(memory, self._slab, self.layout.slab_bytes)
        views: list[AnyArray] = []
        for (shape, dtype, _, offset), place in zip(self.layout.leaves, self._large, strict=True):
            if offset is None:
                views.append(np.ndarray(shape, dtype, _piece(memory, place, nbytes_of(shape, dtype))))
            else:
                views.append(np.ndarray(shape, dtype, slab, offset))
        return tuple(views), slab


def _piece(memory: AnyArray, start: int | None, nbytes: int) -> AnyArray:
    return aligned_bytes(nbytes) if start is None else memory[start : start + nbytes]


def _shift(leaves: list[tuple[int, np.dtype[Any]]], pieces: int) -> int | None:
    """An offset from a multiple of `ALIGNMENT` such that, split into equal pieces, no piece of these leaves begins at a multiple."""
    starts = {size // count * i for size, _ in leaves for count in range(1, pieces + 1) if size % count == 0 for i in range(count)}
    taken = {-start % ALIGNMENT for start in starts}
    itemsize = max((dtype.itemsize for _, dtype in leaves), default=1)
    # Prefer offsets that keep items aligned to their own size: NumPy and JAX are slower without.
    shifts = [shift for step in (itemsize, 1) for shift in range(step, ALIGNMENT, step) if shift not in taken]
    return shifts[0] if shifts else None


@contextlib.contextmanager
def staging_by(make: MakeStaging) -> Generator[None]:
    """Loaders whose first run begins inside the block get their staging ring from this function.

    Example:
        with ps.testing.staging_by(lambda device, capacity: ps.testing.PoisonStaging(capacity)):
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
    """
    with mock.patch.object(building, "choose_staging", make):
        yield


@contextlib.contextmanager
def poisoned_staging(*, pieces: int | None = None) -> Generator[list[PoisonStaging]]:
    """Loaders whose first run begins inside the block stage in a `PoisonStaging`, which is checked at the end of the block.

    Args:
        pieces: see `PoisonStaging`.

    Yields:
        The rings, in the order in which loaders began their first run.

    Raises:
        SlotMisuseError: at the end, if a slot was written to after its release.

    Example:
        with ps.testing.poisoned_staging():
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
    """
    rings: list[PoisonStaging] = []

    def make(device: Any, capacity: int) -> Staging:
        del device
        rings.append(PoisonStaging(capacity, pieces=pieces))
        return rings[-1]

    with staging_by(make):
        yield rings
    for ring in rings:
        ring.check()
