"""One sharding and one leaf, and the shardings that follow from others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.config import HOST
from prefetchshard.base.errors import ConfigError, PlacementError
from prefetchshard.sharding.leaf_sharding import fit, replicated_like, rows_like, with_leading_axis

P = PartitionSpec
NAMES = ("data", "fsdp", "model")


def named(*entries: Any, sizes: tuple[int, ...] = (4, 2), memory_kind: str | None = None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), NAMES[: len(sizes)])
    return NamedSharding(mesh, P(*entries), memory_kind=memory_kind)


class TwoByFour(Sharding):
    """Stands for kinds of Sharding that the public interface does not make: 2 x 4 pieces of a matrix."""

    memory_kind = None
    is_fully_replicated = False

    @property
    def device_set(self) -> set[Any]:
        return set(jax.devices())

    def shard_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._as_named().shard_shape(global_shape)

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> Any:
        return self._as_named().devices_indices_map(global_shape)

    def _as_named(self) -> NamedSharding:
        return NamedSharding(Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b")), P("a", "b"))


def test_a_leaf_of_lower_rank_takes_the_part_that_fits() -> None:
    rule = named("data", None, None, "fsdp", memory_kind="pinned_host")
    assert fit(rule, "image", (8, 3, 3, 2), named=True) is rule
    for shape, spec in (((8,), P("data")), ((8, 3), P("data", None)), ((), P())):
        got = fit(rule, "x", shape, named=False)
        assert got == NamedSharding(rule.mesh, spec, memory_kind="pinned_host")


def test_a_leaf_of_higher_rank_is_whole_along_its_other_axes() -> None:
    assert fit(named("data"), "x", (8, 7, 5), named=True) == named("data")


def test_a_named_leaf_must_fit() -> None:
    with pytest.raises(
        PlacementError, match=r"leaf lab: shape \(8,\) does not fit P\('data', None\) on .*'fsdp': 2.*rank 1, the spec speaks of 2"
    ):
        fit(named("data", None), "lab", (8,), named=True)
    with pytest.raises(PlacementError, match=r"leaf \(the batch itself\): shape \(\)"):
        fit(named("data"), "", (), named=True)


@pytest.mark.parametrize(
    ("entries", "shape", "message"),
    [
        (
            ("data",),
            (63, 2),
            r"leaf x: shape \(63, 2\) .*P\('data'\) on the mesh \{'data': 4, 'fsdp': 2\}: axis 0 \(63\) must be a multiple of 4 \('data'\)",
        ),
        (
            (("data", "fsdp"),),
            (12,),
            r"axis 0 \(12\) must be a multiple of 8 \('data' x 'fsdp'\); choose such a batch_size; .*remainder='pad'.*remainder='drop'",
        ),
        (("data", "fsdp"), (8, 3), r"axis 1 \(3\) must be a multiple of 2 \('fsdp'\); pad or crop that axis"),
    ],
)
def test_what_does_not_divide(entries: tuple[Any, ...], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        fit(named(*entries), "x", shape, named=True)


ENTRIES = st.lists(st.sampled_from([None, *NAMES]), max_size=4).filter(lambda entries: all(entries.count(name) < 2 for name in NAMES))


@settings(deadline=None)
@given(ENTRIES, st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=4))
def test_fit_accepts_what_jax_accepts(entries: list[str | None], shape: list[int]) -> None:
    rule = named(*entries, sizes=(2, 2, 2))
    try:
        got = fit(rule, "x", tuple(shape), named=False)
    except PlacementError:
        with pytest.raises(ValueError, match="evenly divide"):
            NamedSharding(rule.mesh, P(*entries[: len(shape)])).shard_shape(tuple(shape))
    else:
        assert jax.device_put(np.zeros(shape), got).sharding == got


def test_other_kinds_are_used_as_they_are() -> None:
    device = SingleDeviceSharding(jax.devices()[2])
    assert fit(device, "x", (), named=True) is device
    other = TwoByFour()
    assert fit(other, "x", (8, 8), named=False) is other
    with pytest.raises(PlacementError, match=r"leaf x: shape \(3, 8\) does not fit"):
        fit(other, "x", (3, 8), named=False)


def test_replicated_like() -> None:
    assert replicated_like(named("data", memory_kind="pinned_host")) == named(memory_kind="pinned_host")
    device = SingleDeviceSharding(jax.devices()[2])
    assert replicated_like(device) is device
    assert replicated_like(TwoByFour()).is_equivalent_to(named(), 2)


def test_with_leading_axis_cuts_each_part_as_the_whole_was() -> None:
    rule = named(("data", "fsdp"), None, memory_kind="pinned_host")
    assert with_leading_axis(rule) == named(None, ("data", "fsdp"), None, memory_kind="pinned_host")
    assert with_leading_axis(named()) == named()  # a scalar stays one
    device = SingleDeviceSharding(jax.devices()[2])
    assert with_leading_axis(device) is device
    with pytest.raises(ConfigError, match="microbatches need a NamedSharding"):
        with_leading_axis(TwoByFour())


def test_rows_like_takes_axis_0_of_the_first_leaf_that_splits_it() -> None:
    leaves = [HOST, named(), named(None, "fsdp"), named("fsdp", "data", memory_kind="pinned_host"), named("data")]
    shapes = [(), (8,), (8, 2), (8, 4), (8,)]
    assert rows_like(leaves, shapes) == named("fsdp", memory_kind="pinned_host")
    assert rows_like(leaves[:3], shapes[:3]) == named()
    assert rows_like(leaves[:1], shapes[:1]) is HOST
    assert rows_like([SingleDeviceSharding(jax.devices()[2])], [(8, 2)]) == SingleDeviceSharding(jax.devices()[2])


def test_rows_like_of_another_kind_of_sharding() -> None:
    got = rows_like([TwoByFour()], [(8, 8)])
    assert isinstance(got, NamedSharding)
    whole = TwoByFour().devices_indices_map((8, 8))
    assert {device: index[0] for device, index in got.devices_indices_map((8,)).items()} == {
        device: index[0] for device, index in whole.items()
    }
