"""Statistics for Prometheus and for TensorBoard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import prefetchshard as ps
from prefetchshard.exporting.prometheus import UP_TO_SECONDS, PrometheusCollector
from prefetchshard.exporting.scalars import log_scalars, scalars_of
from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.distribution import Durations
from prefetchshard.measuring.stats import Stats
from support import run_python
from test_window import NOTHING


def endless() -> Iterator[np.ndarray]:
    while True:
        yield np.zeros((8, 2), np.float32)


class Known:
    """What has these statistics."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def stats(self) -> Stats:
        return self._stats


def registry_of(collector: PrometheusCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def some_stats() -> Stats:
    waits = Durations()
    waits.add(np.array([0.00005, 0.002, 0.03, 0.03, 200.0]), range(5))
    return msgspec.structs.replace(
        NOTHING, batches=6, rows=48, bytes=4096, dropped_rows=3, padded_rows=2, wall_seconds=12.0, stall_seconds=9.0, busy_seconds=3.0,
        start_up_seconds=0.5, warm_up=Steps(1, 0.5, 0.5, reading=0.5), steady=Steps(4, 2.0, 8.0, reading=6.0, handing_over=2.0),
        source_seconds=20.0, transform_seconds=1.0, copy_seconds=0.25, transfer_seconds=0.125, next=waits.now(), workers=3,
        ready_batch_seconds=6.0, host_batch_seconds=24.0,
        ready=msgspec.structs.replace(NOTHING.ready, ready=1), host=msgspec.structs.replace(NOTHING.host, capacity=5, ready=4),
    )  # fmt: skip


# -- Prometheus


def test_every_number() -> None:
    known = Known(some_stats())
    registry = registry_of(PrometheusCollector(known, {"loader": "train"}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"prefetchshard_{name}", {"loader": "train", **labels})

    for name, expected in {
        "batches_total": 6, "rows_total": 48, "batch_bytes_total": 4096, "dropped_rows_total": 3, "padded_rows_total": 2,
        "step_seconds_total": 3.0, "ready_batches": 1, "ready_batches_limit": 2, "read_batches": 4, "read_batches_limit": 5,
        "reader_threads": 3, "next_seconds_count": 5, "next_seconds_sum": 200.06205,
    }.items():  # fmt: skip
        assert value(name) == pytest.approx(expected), name
    for stage, expected in {
        "start-up": 0.5,
        "reading": 6.5,
        "transform": 0.0,
        "copying": 0.0,
        "transferring": 0.0,
        "handing over": 2.0,
    }.items():
        assert value("stall_seconds_total", stage=stage) == expected, stage
    for stage, expected in {"reading": 20.0, "transform": 1.0, "copying": 0.25, "transferring": 0.125}.items():
        assert value("work_seconds_total", stage=stage) == expected, stage
    counts = [value("next_seconds_bucket", le=str(most)) for most in (*UP_TO_SECONDS, "+Inf")]
    assert counts == [1, 1, 1, 2, 2, 4, 4, 4, 4, 4, 4, 4, 5]


def test_the_text_is_what_prometheus_reads() -> None:
    collector = PrometheusCollector(first := Known(some_stats()), {"loader": "train"})
    collector.add(second := Known(NOTHING), {"loader": "eval"})
    text = generate_latest(registry_of(collector)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {metric.name for metric in collector.describe()}
    assert all(name.startswith("prefetchshard_") and family.documentation for name, family in families.items())
    assert text.count("# TYPE prefetchshard_batches_total counter") == 1
    assert {sample.labels["loader"] for family in families.values() for sample in family.samples} == {"train", "eval"}
    assert (first, second) != (None, None), "they are not kept alive"


def test_a_loader_that_runs(S: NamedSharding) -> None:
    loader = ps.Loader(endless, S)
    registry = registry_of(PrometheusCollector(loader))
    assert registry.get_sample_value("prefetchshard_batches_total") is None, "it has not begun"
    first = iter(loader)
    for _ in range(3):
        next(first)
    assert registry.get_sample_value("prefetchshard_batches_total") == 3
    second = iter(loader)
    assert registry.get_sample_value("prefetchshard_batches_total") is None, "which one?"
    assert registry_of(PrometheusCollector(first)).get_sample_value("prefetchshard_batches_total") == 3
    first.close()
    assert registry.get_sample_value("prefetchshard_batches_total") == 0
    second.close()


def test_a_loader_is_not_kept_alive(S: NamedSharding) -> None:
    loader = ps.Loader(np.zeros(8, np.float32), S, batch_size=8)
    list(loader)
    gone = weakref.ref(loader)
    collector = PrometheusCollector(loader, {"loader": "train"})
    registry = registry_of(collector)
    assert registry.get_sample_value("prefetchshard_batches_total", {"loader": "train"}) == 1
    del loader
    gc.collect()
    assert gone() is None
    assert registry.get_sample_value("prefetchshard_batches_total", {"loader": "train"}) is None
    another = Known(some_stats())
    collector.add(another, {"loader": "train"})
    assert registry.get_sample_value("prefetchshard_batches_total", {"loader": "train"}) == 6


@pytest.mark.parametrize(
    ("labels", "more", "words"),
    [
        ({"stage": "a"}, None, "the label 'stage'"),
        ({"loader": "a"}, {"loader": "a"}, "cannot be told apart"),
        ({}, {}, "cannot be told apart"),
        ({"loader": "a"}, {"name": "b"}, "the same labels"),
        ({"loader": "a"}, None, "the same labels"),
    ],
)
def test_labels_that_cannot_be(labels: dict[str, str], more: dict[str, str] | None, words: str) -> None:
    known = Known(NOTHING)
    with pytest.raises(ps.ConfigError, match=words):
        PrometheusCollector(known, labels).add(known, more)


# -- scalars


class Written(dict[str, tuple[float, int]]):
    """What a writer got."""

    def write(self, tag: str, value: float, step: int) -> None:
        self[tag] = value, step

    def write_all(self, step: int, scalars: dict[str, float]) -> None:
        self.update({tag: (value, step) for tag, value in scalars.items()})


@pytest.mark.parametrize("method", ["add_scalar", "scalar", "write_scalars"])
def test_scalars_for_each_kind_of_writer(method: str) -> None:
    written = Written()
    writer: Any = SimpleNamespace(**{method: written.write_all if method == "write_scalars" else written.write})
    log_scalars(writer, NOTHING, 1)
    assert not written, "of nothing nothing is known"
    log_scalars(writer, some_stats(), 7, prefix="input/")
    assert written == {f"input/{name}": (value, 7) for name, value in scalars_of(some_stats()).items()}
    log_scalars(writer, some_stats(), 8)
    assert written["prefetchshard/rows_per_second"] == (4.0, 8)


def test_every_scalar() -> None:
    found = scalars_of(some_stats())
    for name, expected in {
        "steps_per_second": 0.5, "rows_per_second": 4.0, "bytes_per_second": 4096 / 12, "lost_share": 0.8, "next_seconds/mean": 40.01241,
        "time_share/step": 2.5 / 11, "time_share/reading": 6.5 / 11, "time_share/handing_over": 2 / 11, "ready_batches": 0.5, "read_batches": 2.0,
        "reader_threads": 3.0, "next_seconds/p99": some_stats().next.p99, "step_seconds/mean": 0.0,
        "possible_gain": some_stats().verdict.possible_gain,
    }.items():  # fmt: skip
        assert found[name] == pytest.approx(expected), name
    assert all(type(value) is float for value in found.values())
    assert not any(" " in name for name in found)


def test_what_is_no_writer() -> None:
    with pytest.raises(ps.ConfigError, match="a list, has none of the methods add_scalar, scalar and write_scalars"):
        log_scalars([], some_stats(), 1)


def test_scalars_need_no_package() -> None:
    program = """
        import sys
        sys.modules["prometheus_client"] = None
        import prefetchshard
        from prefetchshard.exporting.scalars import log_scalars

        assert not {"torch", "tensorboardX", "flax", "clu", "rich"} & set(sys.modules)
    """
    done = run_python(program)
    assert (done.returncode, done.stderr) == (0, "")
