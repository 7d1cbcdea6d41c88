"""`device_transform`: jitted once, on the devices, dispatched and handed on unfinished."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, batches, consumer, joined, values
from prefetchshard.placing.device_transform import DeviceTransform
from support import HANG_SECONDS, wait_until

P = PartitionSpec
sync = consumer("sync")
IMAGES = np.arange(32 * 6, dtype=np.uint8).reshape(32, 6)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("data",))


class Traced:
    """Counts how often a function is traced."""

    def __init__(self, function: Any) -> None:
        self.times = 0
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.function(*args, **kwargs)


def scaled(batch: Any) -> Any:
    return {"x": batch["x"].astype(jnp.bfloat16) / 255}


def test_uint8_becomes_bfloat16_on_the_devices(S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=scaled)
    seen = consume(loader)
    assert np.array_equal(joined(seen, lambda b: b["x"]), (IMAGES.astype(jnp.bfloat16) / 255).astype(jnp.bfloat16))
    for batch in batches(seen):
        assert batch["x"].dtype == jnp.bfloat16
        assert batch["x"].sharding.is_equivalent_to(S, 2)
    assert loader.stats().bytes == IMAGES.nbytes, "what is transferred are the small bytes"


def test_it_is_traced_once_for_a_signature(S: NamedSharding) -> None:
    function = Traced(scaled)
    loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=function, epochs=3)
    sync(loader)
    sync(loader)
    assert function.times == 1
    varying = Traced(lambda batch: batch * 2)
    got = sync(ps.Loader([np.ones(8), np.ones(16), np.ones(8), np.ones(16)], S, device_transform=varying, narrow="allow"))
    assert [len(batch) for batch in batches(got)] == [8, 16, 8, 16]
    assert varying.times == 2


def test_one_signature_under_pad_and_drop(S: NamedSharding) -> None:
    for remainder in ("pad", "drop"):
        function = Traced(lambda batch: batch)
        sync(ps.Loader({"x": IMAGES[:30]}, S, batch_size=8, remainder=remainder, device_transform=function, epochs=2))
        assert function.times == 1


def test_any_structure_may_come_out(S: NamedSharding) -> None:
    class Out(NamedTuple):
        image: Any
        total: Any

    def change(batch: Any) -> Any:
        return Out(batch["x"], [batch["x"].astype(jnp.float32).sum(), {"none": None, "first": batch["x"][0]}])

    loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=change)
    for i, batch in enumerate(loader):
        assert type(batch) is Out
        rows = IMAGES[8 * i : 8 * i + 8]
        assert float(batch.total[0]) == rows.sum(dtype=np.float32)
        assert np.array_equal(batch.image, rows)
        assert np.array_equal(batch.total[1]["first"], rows[0])
    assert sorted(loader.spec()) == ["image", "total[0]", "total[1].first"]


# -- spec


def test_spec_shows_what_comes_out(S: NamedSharding) -> None:
    for source, options in (({"x": IMAGES}, {"batch_size": 8}), (lambda: iter([{"x": IMAGES[:8]}] * 3), {})):
        loader = ps.Loader(source, S, device_transform=scaled, **options)
        leaf = loader.spec()["x"]
        assert (leaf.shape, leaf.dtype, leaf.bytes_per_device) == ((8, 6), jnp.bfloat16, 12)
        assert leaf.sharding.is_equivalent_to(S, 2)
        assert len(sync(loader)) == (4 if options else 3), "no batch was lost by asking"


# -- keys


def noise(batch: Any, key: Any) -> Any:
    return {"x": batch["x"], "noise": jax.random.normal(key, (8, 2)), "key": jax.random.key_data(key)}


def just_key(batch: Any, key: Any) -> Any:
    return {"key": jax.random.key_data(key)}


def keys_of(sharding: Any, **options: Any) -> list[list[int]]:
    loader = ps.Loader({"x": IMAGES}, sharding, batch_size=8, device_transform=just_key, **options)
    return [np.asarray(batch["key"]).tolist() for batch in batches(sync(loader))]


def test_a_step_has_one_key_on_any_devices(S: NamedSharding, R: NamedSharding) -> None:
    want = sync(ps.Loader({"x": IMAGES}, one_device(), batch_size=8, device_transform=noise, epochs=2))
    assert len({tuple(np.asarray(b["key"]).tolist()) for b in batches(want)}) == 8, "each step has its own"
    explicit = NamedSharding(jax.make_mesh((4, 2), ("data", "model")), P("data"))
    for sharding in (S, R, explicit):
        got = sync(ps.Loader({"x": IMAGES}, sharding, batch_size=8, device_transform=noise, epochs=2, workers=3))
        for a, b in zip(batches(got), batches(want), strict=True):
            assert np.array_equal(a["key"], b["key"])
            assert np.array_equal(a["noise"], b["noise"])


def test_steps_go_on_over_epochs_and_runs(S: NamedSharding) -> None:
    want = keys_of(S, epochs=4)
    loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=just_key, epochs=2)
    got = [np.asarray(batch["key"]).tolist() for _ in range(2) for batch in batches(sync(loader))]
    assert got == want


def test_a_dropped_batch_uses_no_step(S: NamedSharding) -> None:
    short = [{"x": IMAGES[:8]}, {"x": IMAGES[8:16]}, {"x": IMAGES[16:19]}]
    for transform in (None, lambda batch: batch):
        loader = ps.Loader(short, S, device_transform=just_key, transform=transform, epochs=2, remainder="drop")
        assert [np.asarray(batch["key"]).tolist() for batch in batches(sync(loader))] == keys_of(S)


def test_keys_depend_on_the_seed(S: NamedSharding) -> None:
    seeds = (0, 2**31, 2**32, 2**80)
    firsts = [tuple(keys_of(S, seed=seed)[0]) for seed in seeds]
    assert len(set(firsts)) == len(firsts)
    with jax.enable_x64(True):
        assert [tuple(keys_of(S, seed=seed)[0]) for seed in seeds] == firsts


def test_key_is_asked_for_by_name_alone(S: NamedSharding) -> None:
    def by_partial(batch: Any, scale: float, key: Any) -> Any:
        return just_key(batch, key)

    class Object:
        def __call__(self, batch: Any, *, key: Any) -> Any:
            return just_key(batch, key)

    want = keys_of(S)
    for function in (functools.partial(by_partial, scale=1.0), Object(), jax.jit(just_key), lambda batch, key=None: just_key(batch, key)):
        loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=function)
        assert [np.asarray(batch["key"]).tolist() for batch in batches(sync(loader))] == want


# -- donation


def test_donation_warns_of_nothing_and_hurts_nobody(S: NamedSharding) -> None:
    source = np.arange(64, dtype=np.float32).reshape(32, 2)
    kept = source.copy()
    functions: list[Any] = [
        lambda b: b,
        lambda b: {"x": b["x"] + 1},
        lambda b: {"x": b["x"] + 1, "y": b["x"] * 2, "z": b["x"]},
        lambda b: {"x": b["x"].T},
        lambda b: {"x": b["x"].sum()},
        lambda b: {"x": b["x"].reshape(-1)},
        lambda b: {"x": jnp.zeros((8, 2), jnp.float32)},
        lambda b: {"x": jax.lax.with_sharding_constraint(b["x"] + 1, NamedSharding(S.mesh, P()))},
    ]
    device_arrays = [{"x": jnp.asarray(part)} for part in np.split(source, 4)]
    for function in functions:
        for made, options in (({"x": source}, {"batch_size": 8}), (device_arrays, {})):
            got = [values(batch) for batch in batches(sync(ps.Loader(made, S, device_transform=function, epochs=2, **options)))]
            want = [values(function({"x": jnp.asarray(part)})) for part in np.split(kept, 4) * 2]
            assert jax.tree.all(jax.tree.map(np.array_equal, got, want))
    assert np.array_equal(source, kept)
    assert all(np.array_equal(batch["x"], part) for batch, part in zip(device_arrays, np.split(kept, 4), strict=True))


# -- with leaves on the host, masks, microbatches, explicit meshes


def test_host_leaves_pass_through(S: NamedSharding, consume: Consume) -> None:
    names = np.array([f"n{i}" for i in range(32)])

    def moved(batch: Any) -> Any:
        return {"inner": (batch["x"] * 2, batch["name"])}

    function = Traced(moved)
    loader = ps.Loader({"x": IMAGES, "name": names}, {"x": S, "name": ps.HOST}, batch_size=8, device_transform=function)
    seen = consume(loader)
    assert [name for batch in batches(seen) for name in batch["inner"][1]] == names.tolist()
    assert np.array_equal(joined(seen, lambda b: b["inner"][0]), IMAGES * 2)
    assert function.times == 1
    left_out = ps.Loader({"x": IMAGES, "name": names}, {"x": S, "name": ps.HOST}, batch_size=8, device_transform=lambda b: b["x"])
    assert np.array_equal(joined(sync(left_out)), IMAGES)


def test_host_leaves_that_nobody_can_take_apart(S: NamedSharding) -> None:
    odd = {1: "a", "b": object()}
    loader = ps.Loader([{"x": IMAGES[:8], "odd": odd}] * 2, {"x": S, "odd": ps.HOST}, device_transform=lambda b: b)
    assert [batch["odd"] for batch in batches(sync(loader))] == [odd, odd]


def test_nothing_but_host_leaves(consume: Consume) -> None:
    loader = ps.Loader({"name": np.array(list("abcdefgh"))}, ps.HOST, batch_size=4, device_transform=lambda batch: batch)
    assert [batch["name"].tolist() for batch in batches(consume(loader))] == [list("abcd"), list("efgh")]


def test_a_key_where_nothing_goes_to_a_device() -> None:
    loader = ps.Loader(
        {"name": np.array(list("abcdefgh"))}, ps.HOST, batch_size=4, device_transform=lambda batch, key: {**batch, **just_key(batch, key)}
    )
    got = batches(sync(loader))
    assert [batch["name"].tolist() for batch in got] == [list("abcd"), list("efgh")]
    assert len({tuple(np.asarray(batch["key"]).tolist()) for batch in got}) == 2


def test_the_mask_is_there(S: NamedSharding) -> None:
    def mean(batch: Any) -> Any:
        return {"sum": (batch["x"][:, 0] * batch["mask"]).astype(jnp.float32).sum(), "rows": batch["mask"].sum()}

    loader = ps.Loader({"x": IMAGES[:30]}, S, batch_size=8, remainder="pad", device_transform=mean)
    total = [(float(b["sum"]), int(b["rows"])) for b in batches(sync(loader))]
    assert sum(part for part, _ in total) == IMAGES[:30, 0].sum()
    assert [rows for _, rows in total] == [8, 8, 8, 6]
    loader = ps.Loader(IMAGES[:30], S, batch_size=8, remainder="pad", device_transform=lambda both: {"x": both[0], "valid": both[1]})
    assert joined(sync(loader), lambda b: b["valid"]).sum() == 30


def test_it_sees_the_microbatches(S: NamedSharding) -> None:
    def shapes(batch: Any) -> Any:
        assert batch["x"].shape == (2, 8, 6)
        return {"x": batch["x"].astype(jnp.float32), "sums": batch["x"].sum((1, 2))}

    for batch in batches(sync(ps.Loader({"x": IMAGES}, S, batch_size=16, microbatches=2, device_transform=shapes))):
        assert batch["x"].shape == (2, 8, 6)
        assert batch["sums"].shape == (2,)


@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
def test_explicit_and_auto_meshes(axis_type: str, consume: Consume) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, axis_type),) * 2)
    sharding = NamedSharding(mesh, P("data"))
    loader = ps.Loader({"x": IMAGES}, sharding, batch_size=8, device_transform=noise, remainder="pad")
    seen = consume(loader)
    assert np.array_equal(joined(seen, lambda b: b["x"]), IMAGES)
    assert all(batch["x"].sharding.is_equivalent_to(sharding, 2) for batch in batches(seen))
    with jax.set_mesh(mesh):
        constrained = ps.Loader(
            {"x": IMAGES}, P("data"), batch_size=8, device_transform=lambda b: jax.lax.with_sharding_constraint(b["x"] + 1, P("data"))
        )
        assert np.array_equal(joined(consume(constrained)), IMAGES + 1)


# -- handed on unfinished


class Unfinished:
    """What a dispatched function gives, as long as nobody waits for it."""

    def block_until_ready(self) -> None:
        pytest.fail("somebody waited for it")

    def __array__(self, *_: Any) -> Any:
        pytest.fail("somebody read it")


def test_a_batch_is_handed_on_before_its_transform_is_done(S: NamedSharding, consume: Consume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTransform, "_jit", lambda *_: lambda *_: {"x": Unfinished()})
    loader = ps.Loader({"x": IMAGES}, S, batch_size=8, device_transform=scaled)
    assert [type(batch["x"]) for batch in batches(consume(loader))] == [Unfinished] * 4


def test_what_it_raises_comes_after_the_good_batches(S: NamedSharding, consume: Consume) -> None:
    class Bad(Exception):
        pass

    def picky(batch: Any) -> Any:
        if batch.shape[0] == 16:
            raise Bad("sixteen")
        return batch

    def source() -> Iterator[np.ndarray]:
        yield from (IMAGES[:8], IMAGES[:8], IMAGES[:16])

    iterator = iter(ps.Loader(source(), S, device_transform=picky))
    assert len(consume(iterator, 2)) == 2
    with pytest.raises(Bad, match="sixteen") as caught:
        consume(iterator)
    assert any("batch 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("devices", [1, 8])
def test_what_runs_on_several_devices_is_dispatched_by_one_thread(devices: int) -> None:
    """The one of the training step: two that dispatch at once may leave devices waiting for each other for ever."""
    threads: set[str] = set()

    def look(batch: Any) -> Any:
        threads.add(threading.current_thread().name)  # while it is traced, which is where it is first dispatched
        return batch * 2

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    loader = ps.Loader(np.arange(64, dtype=np.int32), NamedSharding(mesh, P("data")), batch_size=8, device_transform=look)
    assert [int(np.asarray(batch)[1]) for batch in loader] == [2 * (8 * i + 1) for i in range(8)]
    assert threads == {"prefetchshard-transfer" if devices == 1 else threading.current_thread().name}


def interrupt_what_is_next(iterator: ps.LoaderIterator) -> None:
    """Ctrl-C right after the consumer's thread has made the next batch, and before it has it."""
    wait_until(lambda: iterator.stats().ready.ready >= 1)
    placed: Any = iterator._consumer.outbox.peek_nowait()
    finish = placed.finish

    def interrupted() -> Any:
        placed.finish = finish
        finish()
        raise KeyboardInterrupt

    placed.finish = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iterator)


def test_what_ctrl_c_cut_off_in_it_is_done_again(S: NamedSharding) -> None:
    """Over several devices it runs in the consumer's thread; nothing that it was given is gone then."""
    iterator = iter(ps.prefetch([np.full(8, i, np.int32) for i in range(4)], S, device_transform=lambda x: x + 1))
    next(iterator)
    interrupt_what_is_next(iterator)
    assert [int(np.asarray(batch)[0]) for batch in iterator] == [2, 3, 4]


def test_one_thread_may_look_at_what_another_one_takes(S: NamedSharding) -> None:
    """`spec()` in one thread, the loop in another: the first batch is made once, or twice from what is still there."""
    started, go_on = threading.Event(), threading.Event()

    def traced(batch: Any) -> Any:
        started.set()
        go_on.wait(HANG_SECONDS)
        return batch + 1

    loader = ps.prefetch([np.full(8, i, np.int32) for i in range(3)], S, device_transform=traced)
    specs: list[Any] = []
    looker = threading.Thread(target=lambda: specs.append(loader.spec()))
    looker.start()
    assert started.wait(HANG_SECONDS)
    got: list[int] = []
    taker = threading.Thread(target=lambda: got.extend(int(np.asarray(batch)[0]) for batch in loader))
    taker.start()
    go_on.set()
    looker.join(HANG_SECONDS)
    taker.join(HANG_SECONDS)
    assert got == [1, 2, 3]
    assert len(specs) == 1


def test_shapes_that_never_come_back_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.placing.device_transform.MOST_COMPILED", 3)
    traced = Traced(lambda batch: batch + 1)
    lengths = [*range(1, 9), 8, 7, 1]
    loader = ps.Loader((np.full(n, n, np.float32) for n in lengths), NamedSharding(one_device(), P()), device_transform=traced)
    assert [batch.tolist() for batch in loader] == [[n + 1.0] * n for n in lengths]
    transform = loader._factory._device_transform
    assert transform is not None
    assert len(transform._compiled) == 3
    assert traced.times == 9  # 8 and 7 were kept, 1 was not


# -- without jit


def half_by_value(batch: Any, key: Any) -> Any:
    """What only concrete values allow."""
    image = batch["image"] / 2 if float(batch["image"].max()) > 9 else batch["image"]
    return {**batch, "image": image, "drawn": jax.random.bits(key), "one": 1.0, "zeros": jnp.zeros(3)}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("source", ["arrays", "jax.Arrays", "OnDevice"])
def test_without_jit_it_sees_values(source: str, devices: int) -> None:
    """With its key, beside leaves that stay on the host; what comes out is of the same types and in the same places as with jit."""
    mesh = Mesh(np.array(jax.devices()[8 - devices :]), ("data",))
    S = NamedSharding(mesh, P("data"))
    image = np.arange(32, dtype=np.float32)
    text = np.array([f"row {i}" for i in range(32)])
    made: Any = {
        "arrays": lambda: {"image": image, "text": text},
        "jax.Arrays": lambda: [
            {"image": jax.device_put(image[i : i + 8], NamedSharding(mesh, P())), "text": text[i : i + 8]} for i in range(0, 32, 8)
        ],
        "OnDevice": lambda: ps.OnDevice({"image": image}),
    }[source]()
    rule: Any = {"image": S} if source == "OnDevice" else {"image": S, "text": ps.HOST}
    options: Any = {"seed": 3} if source == "jax.Arrays" else {"seed": 3, "batch_size": 8}
    loader = ps.Loader(made, rule, device_transform=half_by_value, **options)
    with jax.disable_jit():
        assert len(loader) == 4
        got = list(loader)
        specs = loader.spec()
    want = list(ps.Loader(made, rule, device_transform=lambda batch, key: {"drawn": jax.random.bits(key)}, **options))
    assert len(got) == len(want) == 4
    for i, (batch, other) in enumerate(zip(got, want, strict=True)):
        rows = image[8 * i : 8 * i + 8]
        assert np.array_equal(batch["image"], rows / 2 if rows.max() > 9 else rows)
        assert int(batch["drawn"]) == int(other["drawn"])
        assert source == "OnDevice" or batch["text"].tolist() == text[8 * i : 8 * i + 8].tolist()
        for name in ("image", "drawn", "one", "zeros"):
            assert batch[name].committed
            assert batch[name].sharding.device_set == S.device_set
            assert specs[name].shape == batch[name].shape


def test_whether_jit_is_off_is_what_was_in_force_at_iter(S: NamedSharding) -> None:
    """Not where the loader was made, and not where a batch is taken: as with all settings of JAX."""
    seen: list[bool] = []

    def look(batch: Any) -> Any:
        seen.append(isinstance(batch, jax.core.Tracer))
        return batch + 1

    with jax.disable_jit():
        loader = ps.Loader(np.arange(16, dtype=np.int32), S, batch_size=8, device_transform=look)
        iterator = iter(loader)
    assert [int(batch[0]) for batch in iterator] == [1, 9]
    iterator = iter(loader)
    with jax.disable_jit():
        assert [int(batch[0]) for batch in iterator] == [1, 9]
    assert seen == [False, False, True]


def test_what_the_consumers_thread_makes_on_one_device_is_not_donated(R: NamedSharding) -> None:
    """A leaf that comes from several devices is for that thread to move; what Ctrl-C cuts off there is done again on the same arrays."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    source = [{"a": jax.device_put(np.full(8, i, np.float32), R), "b": np.full(8, i, np.float32)} for i in range(3)]
    iterator = iter(ps.prefetch(source, one, device_transform=lambda batch: jax.tree.map(lambda leaf: leaf + 1, batch)))
    interrupt_what_is_next(iterator)
    assert [(int(batch["a"][0]), int(batch["b"][0])) for batch in iterator] == [(1, 1), (2, 2), (3, 3)]
