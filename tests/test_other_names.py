"""Arguments that do not fit a loader are told with those that do, for the names of other libraries too."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import prefetchshard as ps
from prefetchshard.building.other_names import OTHERS

P = PartitionSpec
X = np.zeros((16, 4), np.float32)
ARGUMENTS = list(inspect.signature(ps.Loader).parameters)
MAKERS = [ps.Loader, ps.prefetch]

# From the signatures of torch's DataLoader and samplers, torchdata, tf.data, Grain, datasets, SPDL, WebDataset, flax and transformers.
FROM_OTHERS = """
dataset sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context generator
prefetch_factor persistent_workers pin_memory_device in_order snapshot_every_n_steps num_replicas rank replacement num_samples
buffer_size num_parallel_calls deterministic drop_remainder map_func reshuffle_each_iteration padded_shapes padding_values cycle_length
data_source operations worker_count worker_buffer_size shard_options read_options enable_profiling num_epochs num_threads
prefetch_buffer_size batch_fn transformations cpu_buffer_size device_buffer_size device reseed_each_epoch
function batched drop_last_batch num_proc keep_in_memory streaming split remove_columns input_columns with_indices
src preprocessor aggregator transfer_fn output_order concurrency max_failures mp_ctx stop_after report_stats_interval
batchsize collation_fn partial bufsize handler iterator size devices axis_name data_collator dataloader_num_workers dataloader_drop_last
dataloader_pin_memory dataloader_prefetch_factor per_device_train_batch_size gradient_accumulation_steps
max_steps repeat batch mesh axis shuffle_buffer_size
""".split()


@pytest.mark.parametrize("make", MAKERS, ids=["Loader", "prefetch"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_workers", 4, "write workers=4,"),
        ("num_workers", 0, "write workers=1,"),
        ("num_parallel_calls", -1, 'workers="auto"'),
        ("worker_count", 8, "write workers=8,"),
        ("drop_last", False, r'write remainder="keep".*remainder="pad"'),
        ("drop_last", True, 'write remainder="drop"'),
        ("drop_remainder", False, r'write remainder="keep".*remainder="pad"'),
        ("partial", False, 'write remainder="drop"'),
        ("collate_fn", len, "write collate=..."),
        ("sampler", [3, 1, 2], "shuffle=True"),
        ("batch_sampler", [[3, 1], [2]], "without batch_size"),
        ("prefetch_factor", 2, "write depth=2,"),
        ("size", 2, "write depth=2,"),
        ("buffer_size", 1000, "shuffle=True"),
        ("shuffle_buffer_size", 1000, "write shuffle=True"),
        ("max_steps", 100, r"itertools.islice\(loader, 100\)"),
        ("pin_memory", True, "leave it out: accelerators"),
        ("persistent_workers", True, "leave it out"),
        ("num_epochs", 3, "write epochs=3"),
        ("num_epochs", None, "write epochs=None"),
        ("repeat", True, "write epochs=None"),
        ("repeat", -1, "write epochs=None"),
        ("repeat", np.int64(2), "write epochs=2"),
        ("repeat", False, "read once"),
        ("batch", 32, "write batch_size=32"),
        ("per_device_train_batch_size", 8, r"write batch_size=ps.PerDevice\(8\)"),
        ("generator", np.random.default_rng(0), "write seed=..."),
        ("device", "cpu", "SingleDeviceSharding"),
        ("mesh", None, "write sharding=NamedSharding"),
        ("worker_init_fn", print, "per_worker"),
        ("timeout", 30, "no deadline"),
        ("pad_value", -1, r"ps.Pad\(value=-1\)"),
        ("gradient_accumulation_steps", 4, "write microbatches=4"),
        ("dataset", X, "first value"),
    ],
)
def test_the_name_that_it_has_here(make: Any, name: str, value: object, said: str) -> None:
    with pytest.raises(ps.ArgumentError, match=f"^Loader has no argument {name!r}: .*{said}"):
        make(X, **{name: value})


@pytest.mark.parametrize("name", FROM_OTHERS)
def test_names_of_other_libraries_are_known(name: str) -> None:
    assert name in OTHERS


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_hint_writes_arguments_that_there_are(name: str) -> None:
    assert name not in ARGUMENTS
    for value in (None, False, True, np.True_, 0, 3, 2.5, "text", X, np.int64(3), len, "x" * 10_000):
        with pytest.raises(ps.ArgumentError) as caught:
            ps.Loader(X, **{name: value})
        text = str(caught.value)
        assert "\n" not in text
        assert len(text) < 300
        written = re.findall(r"\bwrite (\w+)=|\bor (\w+)=", text)
        assert {first or second for first, second in written} <= set(ARGUMENTS)
        assert ": write" in text or ": leave it out" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("batchsizes", "batch_size=3"),
        ("batchSize", "batch_size=3"),
        ("BATCH_SIZE", "did you mean batch_size=3?"),
        ("dept", "did you mean depth=3?"),
        ("epoch", "did you mean epochs=3?"),
        ("shufle", "did you mean shuffle=3?"),
        ("worker", "did you mean workers=3?"),
        ("num_worker", "write workers=3"),
        ("transfrom", "did you mean transform=3?"),
        ("remainders", "did you mean remainder=3?"),
        ("quite_another_thing", "its arguments are source, sharding, host, batch_size, "),
    ],
)
def test_a_name_that_is_near_one(name: str, said: str) -> None:
    with pytest.raises(ps.ArgumentError, match=f"^Loader has no argument {name!r}: ") as caught:
        ps.Loader(X, **{name: 3})
    assert said in str(caught.value)


def test_several_are_told_together() -> None:
    with pytest.raises(ps.ArgumentError) as caught:
        ps.Loader(X, batch_size=8, num_workers=4, drop_last=True, no_such_thing_at_all=1)
    first, *lines = str(caught.value).splitlines()
    assert first == "Loader has no arguments 'num_workers', 'drop_last', 'no_such_thing_at_all':"
    assert [line.split(":")[0] for line in lines] == ["  num_workers=4", "  drop_last=True", "  no_such_thing_at_all=1"]


STATE = ps.Loader(X, batch_size=8).state


@pytest.mark.parametrize("make", MAKERS, ids=["Loader", "prefetch"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (64, "sharding=64 is no sharding: write batch_size=64 .*depth=64"),
        (np.int64(64), "write batch_size=64 "),
        (0, "batch_size=0"),
        (True, "write shuffle=True"),
        (ps.PerDevice(4), r"write batch_size=ps.PerDevice\(4\)"),
        ("pad", "write remainder='pad'"),
        (ps.Pad(value=3), "write remainder=Pad"),
        (STATE, "write state=..."),
        (np.zeros(16), r"an array of shape \(16,\).*ps.Loader\(\(x, y\)"),
        (lambda: jax.numpy.zeros((16, 2)), r"an array of shape \(16, 2\)"),
    ],
)
def test_what_came_to_sharding_by_mistake(make: Any, value: Any, said: str) -> None:
    value = value() if callable(value) else value
    for source in (X, (X, X), [X], iter([X]), {"x": X}):
        with pytest.raises(ps.ArgumentError, match=said):
            make(source, value)
        with pytest.raises(ps.ArgumentError, match=said):
            make(source, sharding=value)


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ((X, P("data"), 64), {}, "source and sharding by position, and got 3 values: write batch_size=64"),
        ((X, 64, True), {}, "got 3 values: write batch_size=64 .*shuffle=True"),
        ((X, P("data"), len), {}, "the others need their names"),
        ((X, P("data")), {"sharding": P()}, "sharding twice"),
        ((X,), {"source": X}, "source twice"),
        ((), {}, "needs a source"),
        ((), {"batch_size": 8}, "needs a source"),
        ((), {"data": X, "batch_size": 8}, "'data'"),
    ],
)
def test_values_by_position(values: Any, options: Any, said: str) -> None:
    for make in MAKERS:
        with pytest.raises(ps.ArgumentError, match=said):
            make(*values, **options)


def test_it_is_a_type_error_a_value_error_and_goes_through_pickle() -> None:
    for kind in (TypeError, ValueError, ps.ConfigError, ps.PrefetchError):
        with pytest.raises(kind):
            ps.Loader(X, num_workers=2)
    error = ps.ArgumentError("text")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again)) == (ps.ArgumentError, "text")


def test_a_type_error_from_inside_is_not_taken_for_one() -> None:
    class Odd:
        def __len__(self) -> int:
            raise TypeError("from the source")

        def __getitem__(self, row: int) -> int:
            return row

    with pytest.raises(TypeError, match="from the source") as caught:
        ps.Loader(Odd(), batch_size=8)
    assert not isinstance(caught.value, ps.ArgumentError)


def test_a_subclass_has_arguments_of_its_own() -> None:
    class Mine(ps.Loader[Any]):
        def __init__(self, source: Any, num_workers: int, **options: Any) -> None:
            super().__init__(source, workers=num_workers, **options)

    assert len(Mine(X, 2, batch_size=8)) == 2
    assert list(inspect.signature(Mine).parameters) == ["source", "num_workers", "options"]
    with pytest.raises(ps.ArgumentError, match=r"'drop_last': write remainder=\"drop\""):
        Mine(X, 2, drop_last=True)


def test_the_signature_is_seen_as_it_is() -> None:
    assert ARGUMENTS[:4] == ["source", "sharding", "host", "batch_size"]
    assert ps.Loader.__init__.__qualname__ == "Loader.__init__"
    assert "batch_size: " in str(inspect.signature(ps.Loader))


def test_arrays_and_meshes_that_are_shardings_are_taken() -> None:
    for sharding in (Mesh(np.array(jax.devices()), ("data",)), P("data"), None, lambda path, shape, dtype: P("data"), ps.HOST):
        ps.Loader(X, sharding, batch_size=8)


def test_a_warning_of_the_source_points_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's own frames are counted right."""

    class Forks:
        num_workers = 2

        def __iter__(self) -> Any:
            return iter([X])

    Forks.__module__ = "torch.utils.data"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "version_info", (3, 11))
    with pytest.warns(ps.PrefetchWarning, match="forks its workers") as caught:
        ps.Loader(Forks())
    assert caught[0].filename == __file__
