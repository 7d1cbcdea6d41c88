"""A source that may reuse its buffers is asked for the next batch only once the last one is copied, unless nobody could overwrite it:
the counts of references tell. Whichever way a source holds on to what it yielded, its writing there changes no batch."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.leaves.copying import are_unshared
from prefetchshard.reading.reading_plan import Part
from prefetchshard.reading.writing import Writer
from support import HANG_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("slow_sources")
BATCHES = 6
SHAPE = (8, 64)
Overwrite = Callable[[], None]


class Pair(NamedTuple):
    x: Any
    y: Any


def fresh(i: int) -> np.ndarray:
    return np.full(SHAPE, i, np.float32)


# --- how a source may hold on to what it yields: a batch, and what overwrites it


def the_array(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    return x, lambda: x.fill(-1)


def the_container(i: int) -> tuple[Any, Overwrite]:
    batch = {"x": fresh(i)}
    return batch, lambda: batch["x"].fill(-1)


def a_container_inside(i: int) -> tuple[Any, Overwrite]:
    inside = [fresh(i)]
    return {"deep": (inside, fresh(i))}, lambda: inside[0].fill(-1)


def a_view(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    view = x[2:5]
    return x, lambda: view.fill(-1)


def its_base(i: int) -> tuple[Any, Overwrite]:
    base = np.full((10, 64), i, np.float32)
    return base[1:9], lambda: base.fill(-1)


def a_view_of_its_base(i: int) -> tuple[Any, Overwrite]:
    base = np.full((10, 64), i, np.float32)
    view = base[3:]
    return base[1:9], lambda: view.fill(-1)


def a_view_with_another_shape(i: int) -> tuple[Any, Overwrite]:
    flat = np.full(8 * 64, i, np.float32)
    return flat.reshape(SHAPE), lambda: flat.fill(-1)


def a_buffer(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    buffer = memoryview(x)
    return x, lambda: np.asarray(buffer).fill(-1)


def its_bytes(i: int) -> tuple[Any, Overwrite]:
    memory = bytearray(fresh(i).tobytes())
    return np.frombuffer(memory, np.float32).reshape(SHAPE), lambda: memory.__setitem__(slice(0, 64), b"\xff" * 64)


def mapped_memory(i: int) -> tuple[Any, Overwrite]:
    memory = mmap.mmap(-1, fresh(i).nbytes)
    np.frombuffer(memory, np.float32)[:] = i
    return np.frombuffer(memory, np.float32).reshape(SHAPE), lambda: memory.__setitem__(slice(0, 64), b"\xff" * 64)


def a_pointer(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    pointer = x.ctypes.data_as(ctypes.c_void_p)
    return x, lambda: (ctypes.memset(pointer, 255, 64), None)[1]


def foreign_memory(i: int) -> tuple[Any, Overwrite]:
    memory = (ctypes.c_float * (8 * 64))(*fresh(i).ravel())
    return np.ctypeslib.as_array(memory).reshape(SHAPE), lambda: (ctypes.memset(memory, 255, 64), None)[1]


def an_array_interface(i: int) -> tuple[Any, Overwrite]:
    class Owner:
        def __init__(self) -> None:
            self.memory = fresh(i)
            self.__array_interface__ = self.memory.__array_interface__

    owner = Owner()
    return np.asarray(owner), lambda: owner.memory.fill(-1)


def a_capsule(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    return np.from_dlpack(x), lambda: x.fill(-1)


def filling(reference: weakref.ref[np.ndarray]) -> Overwrite:
    def overwrite() -> None:
        alive = reference()
        if alive is not None:
            alive.fill(-1)

    return overwrite


def a_weak_reference(i: int) -> tuple[Any, Overwrite]:
    x = fresh(i)
    return x, filling(weakref.ref(x))


def a_weak_reference_to_its_base(i: int) -> tuple[Any, Overwrite]:
    base = np.full((10, 64), i, np.float32)
    return base[1:9], filling(weakref.ref(base))


HELD = (
    the_array, the_container, a_container_inside, a_view, its_base, a_view_of_its_base, a_view_with_another_shape, a_buffer, its_bytes,
    mapped_memory, a_pointer, foreign_memory, an_array_interface, a_capsule, a_weak_reference, a_weak_reference_to_its_base,
)  # fmt: skip

UNSHARED: dict[str, Callable[[int], Any]] = {
    "an array": fresh,
    "a dict": lambda i: {"x": fresh(i), "y": np.full(8, i)},  # int64: to be narrowed
    "leaves that nobody can change": lambda i: {"x": fresh(i), "y": jax.numpy.full(8, i), "z": float(i), "n": np.int32(i)},
    "containers": lambda i: (Pair(fresh(i), [fresh(i)]), {"z": None}),
    "a view of what nobody has": lambda i: np.full((64, 8), i, np.float32).T,
    "another shape of what nobody has": lambda i: np.full(8 * 64, i, np.float32).reshape(SHAPE),
}


class Watched:
    """Puts itself where a worker copies a batch that the source's thread handed over: it waits until `until` is set, and then copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed = 0
        self.until = threading.Event()
        copy = Writer.copy_share

        def late(*args: Any) -> None:
            if threading.current_thread().name.startswith("prefetchshard-reader"):
                self.handed += 1
                assert self.until.wait(HANG_SECONDS)
            copy(*args)

        monkeypatch.setattr(Writer, "copy_share", late)
        monkeypatch.setattr("prefetchshard.reading.batch_copying.cpu_count", lambda: 4)


def values(batches: list[Any]) -> list[list[float]]:
    return [np.unique(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(batch)])).tolist() for batch in batches]


@pytest.mark.parametrize("hold", HELD)
def test_what_the_source_can_still_reach_is_copied_first(hold: Any, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def source() -> Iterator[Any]:
        for i in range(BATCHES):
            batch, overwrite = hold(i)
            box = [batch]
            del batch
            yield box.pop()
            overwrite()
            watched.until.set()  # who has not copied yet copies what was overwritten

    assert values(list(ps.prefetch(source(), S))) == [[i] for i in range(BATCHES)]
    assert watched.handed == 0


@pytest.mark.parametrize("make", UNSHARED.values(), ids=UNSHARED)
def test_a_source_goes_on_where_nobody_can_reach_what_it_made(
    make: Callable[[int], Any], S: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)

    def source() -> Iterator[Any]:
        for i in range(BATCHES):
            yield make(i)
            if i == 1:  # the first is looked at more closely
                watched.until.set()  # or the second waits for ever

    assert values(list(ps.prefetch(source(), S))) == [[i] for i in range(BATCHES)]
    assert watched.handed == BATCHES - 1


def test_a_failure_in_a_batch_that_was_handed_over_comes_in_its_place(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.until.set()
    copy = Writer.copy_share

    def faulty(writer: Writer, batch: Any, *share: Any) -> None:
        if batch.first_row == 3:
            raise RuntimeError("boom")
        copy(writer, batch, *share)

    monkeypatch.setattr(Writer, "copy_share", faulty)
    got: list[Any] = []
    with pytest.raises(RuntimeError, match="boom") as caught:
        got.extend(ps.prefetch((fresh(i) for i in range(BATCHES)), S))
    assert any("while reading" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["plain", "narrowed"])
def test_nobody_holds_what_was_copied(dtype: Any, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.until.set()
    ending = threading.Event()

    def source() -> Iterator[Any]:
        yield from (np.full(SHAPE, i, dtype) for i in range(BATCHES))
        ending.wait()

    def copied() -> list[Any]:
        return [value for value in gc.get_objects() if type(value) is Part]

    earlier = copied()  # of other tests; held, so that nothing new gets their place in memory
    known = set(map(id, earlier))
    with ps.prefetch(source(), S) as loader:
        iterator = iter(loader)
        for _ in range(BATCHES):
            next(iterator)
        wait_until(lambda: known.issuperset(map(id, copied())))
        ending.set()
    assert watched.handed == BATCHES - 1


def test_what_is_on_the_devices_is_not_handed_over(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to copy of it."""
    watched = Watched(monkeypatch)
    source = (jax.device_put(fresh(i), S) for i in range(BATCHES))
    assert values(list(ps.prefetch(source, S))) == [[i] for i in range(BATCHES)]
    assert watched.handed == 0


def test_an_async_source_goes_on_too(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.until.set()

    async def source() -> AsyncIterator[Any]:
        for i in range(50):
            yield fresh(i)

    assert values(list(ps.prefetch(source(), S))) == [[i] for i in range(50)]
    assert watched.handed > 0  # not each: the loop may not have come to letting go of it


@pytest.mark.parametrize("hold", HELD)
def test_references_tell_who_holds_what(hold: Any) -> None:
    batch, overwrite = hold(0)
    leaves = jax.tree.leaves(batch)
    del batch
    shared = not are_unshared(leaves)
    assert shared, overwrite


@pytest.mark.parametrize("make", UNSHARED.values(), ids=UNSHARED)
def test_references_tell_that_nobody_does(make: Callable[[int], Any]) -> None:
    batch = make(0)
    leaves = jax.tree.leaves(batch)
    del batch
    assert are_unshared(leaves)


def test_an_array_that_is_in_a_batch_twice() -> None:
    leaves = [fresh(0)] * 2
    assert not are_unshared(leaves)


def test_what_holds_other_objects_is_shared() -> None:
    leaves: list[Any] = [np.array([[fresh(0)], None], object)]
    assert not are_unshared(leaves)


def test_without_counts_everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.leaves.copying._counts_references", False)
    leaves = [fresh(0)]
    assert not are_unshared(leaves)
