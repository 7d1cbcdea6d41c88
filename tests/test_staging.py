"""Staging memory: used again as soon as nothing refers to it any more, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding

import prefetchshard as ps
from prefetchshard.staging.aliased import SIZES_KEPT, AliasedStaging
from prefetchshard.staging.layout import ALIGNMENT, SMALL_BYTES, FreshStaging, Layout, Staging
from support import HANG_SECONDS

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU backend alone aliases NumPy memory")

F4 = np.dtype(np.float32)
LARGE = (8, SMALL_BYTES // 32)  # of float32: just large enough for the ring
SMALL = (8, 3)


def lease(staging: Staging, *shapes: tuple[int, ...], dtype: Any = F4) -> tuple[np.ndarray, ...]:
    return staging.lease(Layout([(shape, np.dtype(dtype)) for shape in shapes])).views


def address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def settle() -> None:
    """JAX lets go of what it aliased at its next dispatch."""
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))


KINDS: dict[str, Callable[[], Staging]] = {"aliased": lambda: AliasedStaging(4), "fresh": FreshStaging}
kinds = pytest.mark.parametrize("kind", KINDS)


# --- what a lease is


leaves = st.lists(
    st.tuples(
        st.lists(st.integers(0, 300), max_size=3).map(tuple),
        st.sampled_from(["bool", "int8", "float16", "float32", "complex128", ml_dtypes.bfloat16, ml_dtypes.int4]).map(np.dtype),
    ),
    max_size=6,
).filter(lambda leaves: sum(np.prod(shape) * dtype.itemsize for shape, dtype in leaves) < 1 << 24)


@kinds
@settings(max_examples=100, deadline=None, derandomize=True)
@given(leaves=leaves)
def test_a_lease_has_a_view_of_its_own_for_each_leaf(kind: str, leaves: list[Any]) -> None:
    staging = KINDS[kind]()
    for _ in range(2):  # fresh memory, then memory that was used before
        views = staging.lease(Layout(leaves)).views
        assert [(view.shape, view.dtype) for view in views] == leaves
        ends = []
        for view in views:
            assert type(view) is np.ndarray
            assert view.flags.c_contiguous
            assert view.flags.writeable
            assert view.flags.aligned
            if view.nbytes:
                assert address(view) % ALIGNMENT == 0
                ends.append((address(view), address(view) + view.nbytes))
        ends.sort()
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
        for i, view in enumerate(views):
            view.reshape(-1).view(np.uint8)[:] = i
        assert all((view.reshape(-1).view(np.uint8) == i).all() for i, view in enumerate(views))
        view = views = None


@kinds
def test_live_leases_share_nothing(kind: str) -> None:
    staging = KINDS[kind]()
    views = [view for _ in range(20) for view in lease(staging, LARGE, SMALL, LARGE)]
    starts = sorted((address(view), view.nbytes) for view in views)
    assert all(start + size <= after for (start, size), (after, _) in zip(starts, starts[1:], strict=False))


def test_fresh_memory_is_never_used_again() -> None:
    staging = FreshStaging()
    for _ in range(5):
        lease(staging, LARGE)
    assert (staging.stats().reused, staging.stats().free_bytes) == (0, 0)


# --- used again


def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    staging = AliasedStaging(4)
    (view,) = lease(staging, LARGE)
    (first, second) = view[:4], view.reshape(-1).view(np.uint8)[10:20]
    where = address(view)
    del view
    assert staging.stats().free_bytes == 0
    del first
    assert staging.stats().free_bytes == 0
    del second
    assert staging.stats().free_bytes == SMALL_BYTES
    (again,) = lease(staging, LARGE[::-1], dtype=np.int32)  # of one size, whatever the shape
    assert address(again) == where
    assert (staging.stats().made, staging.stats().reused) == (1, 1)


def test_small_leaves_are_not_tracked() -> None:
    staging = AliasedStaging(4)
    kept = [lease(staging, SMALL, (1 << 13,)) for _ in range(10)]
    assert staging.stats().made == 0
    del kept
    assert staging.stats().free_bytes == 0


def test_no_more_is_kept_than_the_capacity() -> None:
    staging = AliasedStaging(3)
    kept = [lease(staging, LARGE) for _ in range(10)]
    kept.clear()
    assert staging.stats().free_bytes == 3 * SMALL_BYTES
    kept = [lease(staging, LARGE) for _ in range(4)]
    assert (staging.stats().made, staging.stats().reused) == (11, 3)
    kept = [lease(staging, LARGE, LARGE) for _ in range(10)]
    kept.clear()
    assert staging.stats().free_bytes == 6 * SMALL_BYTES


def test_no_more_sizes_are_kept_than_a_few() -> None:
    """Batches of text have many lengths."""
    staging = AliasedStaging(2)
    for extra in range(3 * SIZES_KEPT):
        lease(staging, (SMALL_BYTES + extra,), dtype=np.uint8)
    assert staging.stats().free_bytes <= SIZES_KEPT * (SMALL_BYTES + 3 * SIZES_KEPT)
    made = staging.stats().made
    lease(staging, (SMALL_BYTES + 3 * SIZES_KEPT - 1,), dtype=np.uint8)
    assert staging.stats().made == made  # the last one was kept


# --- never before


def alias(view: np.ndarray, sharding: Any) -> jax.Array:
    return jax.block_until_ready(jax.device_put(view, sharding))


HOLDS: dict[str, Callable[[jax.Array], Any]] = {
    "the array": lambda x: x,
    "one shard": lambda x: x.addressable_shards[-1].data,
    "a NumPy view": np.asarray,
    "a NumPy view of a shard": lambda x: np.asarray(x.addressable_shards[0].data)[:1, :5],
    "a DLPack import": lambda x: np.from_dlpack(x.addressable_shards[0].data),
    "a DLPack import into JAX": lambda x: jax.dlpack.from_dlpack(x.addressable_shards[0].data),
    "forwarded by jit": jax.jit(lambda x: x),
    "donated to jit": jax.jit(lambda x: x, donate_argnums=0),
    "a reshaped one": lambda x: x.reshape(-1),
    "put again": lambda x: jax.device_put(x, x.sharding),
    "put elsewhere": lambda x: jax.device_put(x, jax.devices()[1]),
    "a memory view": lambda x: memoryview(np.asarray(x.addressable_shards[0].data)),
    "an iterator over it": lambda x: iter(np.asarray(x.addressable_shards[0].data)),
}


@on_cpu
@pytest.mark.parametrize("hold", HOLDS)
def test_never_while_anything_refers_to_it(hold: str, S: NamedSharding, R: NamedSharding) -> None:
    for sharding in (S, R, SingleDeviceSharding(jax.devices()[0])):
        staging = AliasedStaging(50)
        kept = []
        for i in range(6):
            (view,) = lease(staging, LARGE)
            view[...] = i
            kept.append(HOLDS[hold](alias(view, sharding)))
            del view
            settle()
            for _ in range(3):  # whatever is free is used, and written
                lease(staging, LARGE)[0][...] = -1
        if hold == "an iterator over it":
            kept = [next(rows) for rows in kept]
        assert [np.unique(np.asarray(x)).tolist() for x in kept] == [[i] for i in range(6)]
        kept.clear()
        settle()


@on_cpu
def test_it_comes_back_when_the_array_is_gone(S: NamedSharding) -> None:
    staging = AliasedStaging(4)
    for i in range(20):
        (view,) = lease(staging, LARGE)
        view[...] = i
        array = alias(view, S)
        del view, array
        settle()
    assert staging.stats().made <= 2


def test_callbacks_wait_for_nothing() -> None:
    """They run inside any allocation, also one that is made under the ring's own lock."""
    staging = AliasedStaging(4)
    kept = [lease(staging, LARGE) for _ in range(3)]
    done = threading.Event()

    def drop() -> None:
        kept.clear()
        done.set()

    with staging._lock:
        thread = threading.Thread(target=drop)
        thread.start()
        assert done.wait(HANG_SECONDS)
    thread.join()
    assert staging.stats().free_bytes == 3 * SMALL_BYTES


def test_cycles_are_collected_inside_a_lease() -> None:
    class Cycle:
        def __init__(self, views: Any) -> None:
            self.views = views
            self.itself = self

    staging = AliasedStaging(4)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Cycle(lease(staging, LARGE))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert staging.stats().made < 200
    assert staging.stats().free_bytes <= 4 * SMALL_BYTES


def test_many_threads_lease_and_drop() -> None:
    staging = AliasedStaging(8)
    wrong: list[int] = []
    handed: list[tuple[np.ndarray, int]] = []
    start = threading.Barrier(4)

    def work(me: int) -> None:
        start.wait()
        for i in range(300):
            mark = me * 1000 + i
            (view,) = lease(staging, LARGE, dtype=np.int32)
            view[:, :4] = mark
            handed.append((view, mark))  # dropped by whoever comes next
            other, its = handed.pop(0)
            if not (other[:, :4] == its).all():
                wrong.append(its)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handed.clear()
    assert wrong == []
    stats = staging.stats()
    assert stats.made + stats.reused == 1200
    assert stats.made < 100
    assert stats.free_bytes <= 8 * SMALL_BYTES


def test_the_ring_may_go_first(S: NamedSharding) -> None:
    staging = AliasedStaging(4)
    (view,) = lease(staging, LARGE)
    view[...] = 5
    array = alias(view, S)
    del staging, view
    settle()
    assert np.unique(np.asarray(array)).tolist() == [5]
    del array
    settle()


# --- in a loader


def batches(count: int, shape: tuple[int, ...] = (8, 4096)) -> Iterator[dict[str, np.ndarray]]:
    for i in range(count):
        yield {"x": np.full(shape, i, np.float32), "y": np.full(shape, i, np.int32)}


@on_cpu
def test_a_hundred_steps_use_the_same_memory(S: NamedSharding) -> None:
    """As many as are on their way at once, whatever the number of steps and of leaves of one size."""
    for leaves in (1, 7):
        step = jax.jit(lambda total, batch: total + sum(leaf.sum() for leaf in batch), donate_argnums=1)
        total: Any = 0.0
        iterator = iter(ps.prefetch(([np.full((8, 4096), i, np.float32)] * leaves for i in range(100)), S))
        for batch in iterator:
            total = jax.block_until_ready(step(total, batch))
            del batch
        assert float(total) == leaves * 8 * 4096 * sum(range(100))
        staging = iterator.stats().staging
        assert staging.made + staging.reused == 100 * leaves
        assert staging.made < 25 * leaves


@on_cpu
def test_it_is_kept_between_runs(S: NamedSharding) -> None:
    x = np.zeros((32, 1 << 12), np.float32)
    loader = ps.Loader({"x": x}, S, batch_size=8, workers=1)
    for _ in range(10):
        for batch in loader:
            del batch
        settle()
    assert loader.stats().staging.made < 20


@on_cpu
def test_memory_of_kept_batches_is_not_waited_for(S: NamedSharding) -> None:
    """It is given away: the run goes on in fresh memory."""
    iterator = iter(ps.prefetch(batches(40), S))
    kept = list(iterator)
    assert iterator.stats().staging.made == 80
    assert [np.unique(np.asarray(batch["y"])).tolist() for batch in kept] == [[i] for i in range(40)]


@on_cpu
def test_leaves_are_aliased_and_copied_once(S: NamedSharding) -> None:
    """What the consumer gets lies in staging memory itself: JAX made no copy of its own."""
    for batch in ps.prefetch(batches(5), S):
        for leaf in batch.values():
            starts = [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
            assert starts == [starts[0] + i * leaf.nbytes // 8 for i in range(8)]


def test_batches_of_many_lengths(S: NamedSharding) -> None:
    lengths = [4096 + 64 * (i % 23) for i in range(60)]
    source = ({"x": np.full((8, length), i, np.float32)} for i, length in enumerate(lengths))
    iterator = iter(ps.prefetch(source, S))
    for i, batch in enumerate(iterator):
        assert batch["x"].shape == (8, lengths[i])
        assert np.unique(np.asarray(batch["x"])).tolist() == [i]
