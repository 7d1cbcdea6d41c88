"""Meshes, pieces of axis 0, and the rows of a process."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prefetchshard.base.errors import ConfigError
from prefetchshard.base.jax_context import mesh_in_force
from prefetchshard.sharding.meshes import (
    ProcessShard,
    axis_names,
    axis_size,
    check_spec,
    make_mesh,
    process_data_shard,
    process_shard,
    row_split,
    sharding_text,
    split_count,
)
from support import REPOSITORY

P = PartitionSpec


def grid(*sizes: int, names: tuple[str, ...] = ("data", "fsdp", "model")) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def test_make_mesh_fills_the_free_axis() -> None:
    mesh = make_mesh({"data": -1, "model": 2})
    assert dict(mesh.shape) == {"data": jax.device_count() // 2, "model": 2}
    assert mesh.axis_names == ("data", "model")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(jax.devices())


def test_make_mesh_uses_the_devices_given() -> None:
    some = jax.devices()[2:6]
    assert set(make_mesh({"a": 2, "b": 2}, some).devices.flat) == set(some)
    assert make_mesh({"only": 1}, jax.devices()[3:4]).devices.tolist() == [jax.devices()[3]]


def test_mesh_in_force_is_that_of_set_mesh() -> None:
    mesh = grid(4, 2)
    assert mesh_in_force() is None
    with jax.set_mesh(mesh):
        assert mesh_in_force() == mesh
    assert mesh_in_force() is None


def test_entries_of_a_spec() -> None:
    mesh = grid(2, 2, 2)
    assert [axis_names(entry) for entry in (None, "data", ("data", "fsdp"))] == [(), ("data",), ("data", "fsdp")]
    assert [axis_size(mesh, entry) for entry in (None, "data", ("data", "fsdp"))] == [1, 2, 4]
    with pytest.raises(ConfigError, match="UNCONSTRAINED cannot place data"):
        axis_names(P.UNCONSTRAINED)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("dota"), r"P\('dota'\) names the axis 'dota', the mesh has \{'data': 4, 'fsdp': 2\}; did you mean 'data'"),
        (P(None, ("data", "modle")), "'modle'"),
        (P("data", "data"), "uses the axis 'data' .* twice"),
        (P(("data", "fsdp"), "fsdp"), "uses the axis 'fsdp' .* twice"),
        (P(P.UNCONSTRAINED), "UNCONSTRAINED"),
    ],
)
def test_check_spec_says_what_is_wrong(spec: PartitionSpec, message: str) -> None:
    check_spec(P("data", None, "fsdp"), grid(4, 2))
    with pytest.raises(ConfigError, match=message):
        check_spec(spec, grid(4, 2))


def shardings() -> list[Any]:
    """For arrays of three axes."""
    named = [
        NamedSharding(mesh, spec)
        for mesh in (grid(8), grid(4, 2), grid(2, 2, 2), jax.make_mesh((4, 2), ("data", "fsdp")))
        for spec in (P(), P("data"), P(None, "data"), P(("data", "fsdp")), P("fsdp", None, "data"), P(("fsdp", "data"), "model"))
        if all(name in mesh.shape for entry in tuple(spec) for name in axis_names(entry))
    ]
    return [*named, SingleDeviceSharding(jax.devices()[5])]


@pytest.mark.parametrize("sharding", shardings(), ids=sharding_text)
def test_pieces_agree_with_the_arrays(sharding: Any) -> None:
    rows, ndim = 16, 3
    array = jax.device_put(np.arange(rows)[:, None, None] * np.ones((1, 8, 8)), sharding)
    held = {tuple(np.asarray(shard.data)[:, 0, 0].astype(int)) for shard in array.addressable_shards}
    assert split_count(sharding, ndim) == row_split(sharding) == len(held)
    for axis in range(ndim):
        assert split_count(sharding, ndim, axis) == array.shape[axis] // array.addressable_shards[0].data.shape[axis]


class MatrixSharding:
    """Stands for kinds of Sharding that the public interface does not make: 2 x 4 pieces of a matrix, and of nothing else."""

    is_fully_replicated = False

    @property
    def device_set(self) -> set[Any]:
        return set(jax.devices())

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 2:
            raise ValueError("for matrices")
        return (shape[0] // 2, shape[1] // 4)


def test_pieces_of_other_kinds_of_sharding() -> None:
    other: Any = MatrixSharding()
    assert [split_count(other, 2, axis) for axis in range(3)] == [2, 4, 1]
    assert row_split(other) == 2


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda n: st.dictionaries(st.integers(0, 5), st.just(n), min_size=1)),
    st.data(),
)
def test_process_shard_cuts_the_pieces(sizes: dict[int, int], data: st.DataObject) -> None:
    """Processes in groups, each group with pieces of its own: the index counts the groups in the order of their rows."""
    group_of = {process: data.draw(st.integers(0, 3)) for process in sizes}
    groups = sorted(set(group_of.values()))
    size = next(iter(sizes.values()))
    pieces = {process: frozenset(range(group * size, (group + 1) * size)) for process, group in group_of.items()}
    for process, group in group_of.items():
        assert process_shard(pieces, process) == (groups.index(group), len(groups))


def test_process_shard_refuses_what_index_and_count_cannot_say() -> None:
    with pytest.raises(ConfigError, match="overlap only in part"):
        process_shard({0: frozenset({0, 1}), 1: frozenset({1, 2})}, 0)
    with pytest.raises(ConfigError, match="process 1 has no device"):
        process_shard({0: frozenset({0})}, 1)


def test_process_data_shard_of_one_process() -> None:
    shard = process_data_shard(grid(4, 2), P("data"))
    assert shard == (0, 1) == (shard.index, shard.count)
    assert isinstance(shard, ProcessShard)
    with pytest.raises(ConfigError, match="did you mean 'data'"):
        process_data_shard(grid(8), P("date"))


def test_sharding_text() -> None:
    assert (
        sharding_text(NamedSharding(grid(4, 2), P(("data", "fsdp"), None)))
        == "P(('data', 'fsdp'), None) on the mesh {'data': 4, 'fsdp': 2}"
    )
    assert sharding_text(NamedSharding(grid(8), P(), memory_kind="pinned_host")) == "P() on the mesh {'data': 8}, pinned_host"
    assert sharding_text(SingleDeviceSharding(jax.devices()[3])) == f"device {jax.devices()[3].id} ({jax.devices()[3].platform})"


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
process = int(sys.argv[1])
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, process)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from prefetchshard.sharding.meshes import process_data_shard
from prefetchshard.placing.transfer import put

grid = np.array(jax.devices()).reshape(2, 2)
across, along = Mesh(grid, ("data", "model")), Mesh(grid.T, ("data", "model"))  # in `along` the model axis runs across the processes
mixed = Mesh(np.array(jax.devices())[[0, 2, 1, 3]], ("data",))
assert process_data_shard(across, P("data")) == (process, 2)
assert process_data_shard(along, P("data")) == (0, 1)
assert process_data_shard(across, P()) == (0, 1)

full = np.arange(32.0, dtype=np.float32).reshape(8, 4)
keys = jax.random.split(jax.random.key(0), 8)
bits = np.asarray(jax.random.key_data(keys))
for mesh, spec in [(across, P("data")), (along, P("data")), (along, P("data", "model")), (across, P(None, "model")), (across, P()), (mixed, P("data"))]:
    sharding = NamedSharding(mesh, spec)
    ours, theirs, number = put([full, jax.numpy.asarray(full), 3], [sharding, sharding, NamedSharding(mesh, P())])
    for array in (ours, theirs):
        assert array.shape == (8, 4) and array.sharding == sharding
        assert all(np.array_equal(shard.data, full[shard.index]) for shard in array.addressable_shards)
    assert all(shard.data == 3 for shard in number.addressable_shards)
    if len(spec) < 2:
        (placed,) = put([keys], [sharding])
        assert placed.shape == (8,) and placed.dtype == keys.dtype
        assert all(np.array_equal(shard.data, bits[shard.index]) for shard in jax.random.key_data(placed).addressable_shards)
print("done")
"""


def test_two_processes_place_their_parts_of_whole_leaves() -> None:
    with socket.socket() as held:  # bound to the end, so that nobody else is given the port; the coordinator may bind it too
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("localhost", 0))
        ended = run_two_processes(str(held.getsockname()[1]))
    assert [(output, code) for output, _, code in ended] == [("done\n", 0)] * 2, ended


def run_two_processes(port: str) -> list[tuple[str, str, int]]:
    """Output, errors and exit code of each."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", TWO_PROCESSES, str(process), port],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        return [(*one.communicate(timeout=120), one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()
