"""What a person reads about a batch."""

from __future__ import annotations

import pickle
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prefetchshard.telling.describe import WIDTH, describe
from support import run_python

P = PartitionSpec
NAMES = ("data", "fsdp", "model")


def on(array: Any, *entries: Any, sizes: tuple[int, ...] = (4, 2)) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), NAMES[: len(sizes)])
    return jax.device_put(array, NamedSharding(mesh, P(*entries)))


def text(drawn: str) -> str:
    return textwrap.dedent(drawn).strip("\n")


def test_a_batch_is_told_and_drawn() -> None:
    batch = {
        "image": on(np.zeros((64, 16), np.float32), "data", "fsdp"),
        "label": on(np.zeros(64, np.int32), "data"),
        "mask": on(np.zeros((64,), bool), "data"),
        "names": ["a"] * 64,
        "weights": on(np.zeros((3, 3), np.float32)),
        "ids": np.arange(3),
        "step": 3,
        "none": None,
    }
    assert describe(batch) == text("""
        7 leaves on 8 cpu devices, 628 B a device

        leaf     shape     dtype       a device  placed
        ids      (3,)      int64                 host
        image    (64, 16)  float32     512 B     [1] P('data', 'fsdp')
        label    (64,)     int32       64 B      [2] P('data')
        mask     (64,)     bool        16 B      [2] P('data')
        names              list of 64            host
        step               int                   host
        weights  (3, 3)    float32     36 B      [3] P()

        [1] image: P('data', 'fsdp') on the mesh {'data': 4, 'fsdp': 2}
                       | axis 1 0:8 | axis 1 8:16
            rows 0:16  | device 0   | device 1
            rows 16:32 | device 2   | device 3
            rows 32:48 | device 4   | device 5
            rows 48:64 | device 6   | device 7

        [2] label, mask: P('data') on the mesh {'data': 4, 'fsdp': 2}
            rows 0:16  | devices 0, 1
            rows 16:32 | devices 2, 3
            rows 32:48 | devices 4, 5
            rows 48:64 | devices 6, 7

        [3] weights: P() on the mesh {'data': 4, 'fsdp': 2}
            all 8 devices hold all of it
        """)


def test_a_notebook_shows_it_as_it_is_printed() -> None:
    for batch in ({"x": on(np.zeros((8, 3)), "data")}, {}):
        told = describe(batch)
        assert repr(told) == str(told) == f"{told}"
        assert type(str(told)) is str
        assert pickle.loads(pickle.dumps(told)) == told


def test_three_axes_split() -> None:
    told = describe([on(np.zeros((4, 4, 4)), "model", "fsdp", "data", sizes=(2, 2, 2))])
    assert told.endswith(
        text("""
            [1] [0]: P('model', 'fsdp', 'data') on the mesh {'data': 2, 'fsdp': 2, 'model': 2}
                                     | axis 2 0:2 | axis 2 2:4
                rows 0:2, axis 1 0:2 | device 0   | device 4
                rows 0:2, axis 1 2:4 | device 2   | device 6
                rows 2:4, axis 1 0:2 | device 1   | device 5
                rows 2:4, axis 1 2:4 | device 3   | device 7
            """)
    )


def test_microbatches_are_split_along_the_second_axis() -> None:
    told = describe((on(np.zeros((4, 16, 8), np.float32), None, ("data", "fsdp")),))
    assert "    axis 1 0:2   | device 0\n" in told
    assert told.endswith("    axis 1 14:16 | device 7")


def test_one_device_and_a_batch_that_is_one_leaf() -> None:
    told = describe(jax.device_put(np.zeros(3, np.float32), SingleDeviceSharding(jax.devices()[3])))
    assert told.startswith("1 leaf on 1 cpu device, 12 B a device\n")
    assert "(the batch itself)  (3,)   float32  12 B      [1] device 3 (cpu)" in told
    assert told.endswith("    device 3 holds all of it")


def test_a_few_devices_are_not_all() -> None:
    mesh = Mesh(np.array(jax.devices()[2:6]), ("data",))
    told = describe(jax.device_put(np.zeros(3, np.float32), NamedSharding(mesh, P())))
    assert told.endswith("    devices 2-5 hold all of it")


def test_keys_rows_that_are_empty_and_deleted_arrays() -> None:
    keys = on(jax.random.split(jax.random.key(0), 8), ("data", "fsdp"))
    gone = on(np.zeros(8, np.float32), "data")
    gone.delete()
    told = describe({"keys": keys, "empty": on(np.zeros((8, 0), np.float32), "data"), "gone": gone})
    assert "keys   (8,)    key<fry>  8 B       [2] P(('data', 'fsdp'))" in told
    assert "empty  (8, 0)  float32   0 B       [1] P('data')" in told
    assert "gone   (8,)    float32   8 B       [1] P('data')" in told


@pytest.mark.parametrize(("batch", "told"), [({}, "a batch without leaves"), (None, "a batch without leaves")])
def test_nothing(batch: Any, told: str) -> None:
    assert describe(batch) == told


def test_all_on_the_host() -> None:
    assert describe({"x": np.zeros(3, np.int8)}) == text("""
        1 leaf, all on the host

        leaf  shape  dtype  a device  placed
        x     (3,)   int8             host
        """)


def test_bytes_are_of_the_fullest_device() -> None:
    here = jax.device_put(np.zeros(1 << 18, np.float32), jax.devices()[0])
    there = jax.device_put(np.zeros(1 << 10, np.float32), jax.devices()[1])
    told = describe([here, there])
    assert told.startswith("2 leaves on 2 cpu devices, 1.0 MiB a device")
    assert "4.0 KiB" in told


def test_many_leaves_are_counted() -> None:
    told = describe({f"{i:02}": np.zeros(1) for i in range(45)}).splitlines()
    assert told[-1] == "... and 5 more leaves"
    assert len(told) == 1 + 1 + 1 + 40 + 1


def test_many_devices_are_shortened() -> None:
    done = run_python(
        """
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from prefetchshard.telling.describe import WIDTH, describe

        mesh = Mesh(np.array(jax.devices()).reshape(4, 16), ("data", "model"))
        specs = [P("data", "model"), P(("data", "model")), P("model", "data"), P(None, "data")]
        batch = {f"a long name {'x' * 50} {i}": jax.device_put(np.zeros((64, 64)), NamedSharding(mesh, spec)) for i, spec in enumerate(specs)}
        told = describe(batch)
        print(told)
        assert max(map(len, told.splitlines())) <= WIDTH
        """,
        env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "64"},
    )
    assert done.returncode == 0, done.stderr
    assert "rows 0:16  | device 0   | device 1   | device 2    | device 3     | ... | device 15\n" in done.stdout
    assert "    ... 49 more |\n    rows 63:64 | device 63\n" in done.stdout
    assert "    axis 1 0:16  | devices 0-15\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
