"""Fakes that a test can own: time, and staging memory that turns to poison as soon as it is released."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import msgspec
import numpy as np

from prefetchshard.base.jax_types import devices
from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.building import run_factory as building
from prefetchshard.placing.transfer_loops import TransferLimits
from prefetchshard.staging.aliased import ALIGNMENT, Layout, Staging, StagingStats, aligned_bytes, nbytes_of

MakeStaging: TypeAlias = Callable[[Any, int], Staging]
"""From one of the devices and a number of slots to a ring."""

POISON = 0xA5
"""Fills a slot that is not in use. As any integer, and as a float, it is an unlikely value."""

MOST_LAYOUTS = 64


class ManualClock:
    """Seconds that pass when a test says so.

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
        """Let time pass. Returns the new time.

        Raises:
            ValueError: it would run backwards.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not run backwards")
        with self._lock:
            self._seconds += seconds
            return self._seconds


class SlotMisuseError(AssertionError):
    """Staging memory was used outside its loan.

    What to do: release staging memory once, when the transfer out of it is ready, and touch it no more.
    """


class PoisonCounts(msgspec.Struct, frozen=True):
    """What a `PoisonStaging` has counted so far.

    Attributes:
        leased: batches that got memory.
        released: of them, those whose memory was given back.
        dropped: of them, those whose memory nobody held any more (runs that were closed).
        out: slots that are on loan now.
        not_reused: pieces of memory that could not be misaligned at every cut, so that they were used once.

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
    """A ring that behaves on the CPU backend as the page-locked one does on an accelerator, and catches what must not be done to it.

    Its slots begin where the CPU backend does not alias them but copies them, and large ones after the call that puts them has
    returned: a slot that is released too early is read too late. So it is overwritten with poison as soon as it is released, and the slot
    that was released last is the first to be used again. Poison that is no longer there when it is used again was overwritten by
    somebody who still wrote.

    Args:
        capacity: free slots that are kept.
        pieces: into how many pieces a leaf may be cut; None: as many as there are devices.

    Raises:
        SlotMisuseError: from `lease` and `check`, and where memory is released twice.

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
        """Take back what was given back since the last call. The caller holds the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                slot, released = self._back.get_nowait()
                self._released += released
                self._dropped += not released
                self._free.append(slot)
        while len(self._free) > self._capacity:
            self._free.pop(0).check()

    def check(self) -> PoisonCounts:
        """What it was used for so far.

        Raises:
            SlotMisuseError: a slot that is not in use was written to.
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
            raise SlotMisuseError("a slot is to be used that is on loan")
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
    """A slot on loan. Dropped without a release (a run that was closed), it comes back by itself."""

    __slots__ = ("_back", "_slot", "slab", "views")

    def __init__(self, slot: _PoisonedSlot, places: _Places, back: queue.SimpleQueue[tuple[_PoisonedSlot, bool]]) -> None:
        self._slot: _PoisonedSlot | None = slot
        self._back = back
        self.views, self.slab = places.views(slot.memory)

    def release(self) -> None:
        """The transfer out of it is ready, or will never be made.

        Raises:
            SlotMisuseError: it was said before.
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
    """Where the leaves of a layout lie in a slot: nowhere where the CPU backend would alias a piece of one.

    What cannot be placed so gets memory of its own that is used once, as an alias of it may live on in a batch.
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
    """How far after a multiple of `ALIGNMENT` memory begins, so that no piece of these leaves, of equal pieces, begins at one."""
    starts = {size // count * i for size, _ in leaves for count in range(1, pieces + 1) if size % count == 0 for i in range(count)}
    taken = {-start % ALIGNMENT for start in starts}
    itemsize = max((dtype.itemsize for _, dtype in leaves), default=1)
    # Where it can be, items are aligned for themselves: NumPy and JAX are slower where they are not.
    shifts = [shift for step in (itemsize, 1) for shift in range(step, ALIGNMENT, step) if shift not in taken]
    return shifts[0] if shifts else None


@contextlib.contextmanager
def staging_by(make: MakeStaging) -> Generator[None]:
    """Let loaders take their staging from this function, if their first run begins inside the block.

    Example:
        with ps.testing.staging_by(lambda device, capacity: ps.testing.PoisonStaging(capacity)):
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
    """
    with _instead("choose_staging", make):
        yield


@contextlib.contextmanager
def _instead(name: str, thing: Any) -> Generator[None]:
    names = building.__dict__
    before = names[name]
    names[name] = thing
    try:
        yield
    finally:
        names[name] = before


@contextlib.contextmanager
def poisoned_staging(*, pieces: int | None = None, waits_apart: bool = True) -> Generator[list[PoisonStaging]]:
    """Let loaders stage in `PoisonStaging`, and look at its slots at the end.

    Args:
        pieces: see there.
        waits_apart: one thread dispatches the transfers and another one waits for them, as on accelerators.

    Yields:
        The rings, in the order in which loaders began their first run.

    Raises:
        SlotMisuseError: at the end, where a slot was written to after its release.

    Example:
        with ps.testing.poisoned_staging():
            list(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
    """
    rings: list[PoisonStaging] = []

    def make(device: Any, capacity: int) -> Staging:
        del device
        rings.append(PoisonStaging(capacity, pieces=pieces))
        return rings[-1]

    def limits(in_flight: int, **_: Any) -> TransferLimits:
        return TransferLimits(in_flight, waits_apart=waits_apart)

    with staging_by(make), _instead("TransferLimits", limits):
        yield rings
    for ring in rings:
        ring.check()
