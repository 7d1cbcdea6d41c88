"""The statistics of loaders for Prometheus. Needs the extra `prometheus`.

    from prefetchshard.exporting.prometheus import PrometheusCollector
    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(PrometheusCollector(loader, {"loader": "train"}))
    start_http_server(8000)

They are asked for when they are scraped, in the thread that serves that; the loop pays nothing for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from prefetchshard.base.errors import ConfigError
from prefetchshard.measuring.distribution import Distribution, upper_of
from prefetchshard.measuring.shares import waits_of
from prefetchshard.measuring.stats import Stats

UP_TO_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
"""The buckets of the histogram. Each duration is counted to 2 %."""

OWN_LABELS = {"stage", "le"}


class Watched(Protocol):
    """A loader or an iterator."""

    def stats(self) -> Stats: ...


class PrometheusCollector(Collector):
    """A collector for a registry of `prometheus_client`: counters of the present run of a loader, and what its queues hold now.

    `prefetchshard_stall_seconds_total{stage=...}` says what the loop waited for; its rate is the share of the time. Counters begin at 0
    with each run of a loader, as they do when a process starts, and what a run does after its last scrape is not seen. There are no
    numbers before the first run, while several runs are live (give it the iterators), and once the loader is gone: it is not kept alive.

    A registry takes one collector with these names. `add` gives it more loaders.

    Args:
        watched: a loader, or an iterator of one.
        labels: of its numbers, names and values.

    Raises:
        ConfigError: a label has a name that is used already.

    Example:
        from prometheus_client import CollectorRegistry, generate_latest
        from prefetchshard.exporting.prometheus import PrometheusCollector
        loader = ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16)
        collector = PrometheusCollector(loader, {"loader": "train"})
        (registry := CollectorRegistry()).register(collector)
        assert b"prefetchshard_batches_total" in generate_latest(registry)

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, watched: Watched, labels: Mapping[str, str] | None = None) -> None:
        self._names = tuple(labels or ())
        if wrong := OWN_LABELS.intersection(self._names):
            raise ConfigError(f"the label {sorted(wrong)[0]!r} is one that the metrics have themselves: choose another name")
        self._watched: tuple[tuple[weakref.ref[Watched], tuple[str, ...]], ...] = ()  # a new tuple each time, so that readers need no lock
        self.add(watched, labels)

    def add(self, watched: Watched, labels: Mapping[str, str] | None = None) -> None:
        """Collect the numbers of another loader, or iterator, too.

        Args:
            watched: the loader.
            labels: of its numbers: the same names, other values.

        Raises:
            ConfigError: other names, or the same values.
        """
        given = labels or {}
        if set(given) != set(self._names):
            raise ConfigError(f"all loaders of a collector have the same labels: {list(self._names)}, not {list(given)}")
        values = tuple(str(given[name]) for name in self._names)
        here = [(ref, known) for ref, known in self._watched if ref() is not None]
        if any(known == values for _, known in here):
            raise ConfigError(f"two loaders with the same labels {dict(given)} cannot be told apart")
        self._watched = (*here, (weakref.ref(watched), values))

    def describe(self) -> Iterable[Metric]:
        """The metrics without numbers."""
        return _Metrics.make(self._names)

    def collect(self) -> Iterable[Metric]:
        """The metrics with the numbers of now."""
        metrics = _Metrics.make(self._names)
        for ref, values in self._watched:
            watched = ref()
            if watched is None:
                continue
            try:
                stats = watched.stats()
            except ConfigError:  # no run, or several
                continue
            metrics.add(list(values), stats)
        return metrics


class _Metrics(NamedTuple):
    """In the order in which they are told."""

    batches: CounterMetricFamily
    rows: CounterMetricFamily
    bytes: CounterMetricFamily
    dropped: CounterMetricFamily
    padded: CounterMetricFamily
    stall: CounterMetricFamily
    step: CounterMetricFamily
    work: CounterMetricFamily
    next: HistogramMetricFamily
    ready: GaugeMetricFamily
    ready_limit: GaugeMetricFamily
    read: GaugeMetricFamily
    read_limit: GaugeMetricFamily
    threads: GaugeMetricFamily

    @classmethod
    def make(cls, labels: tuple[str, ...]) -> _Metrics:
        def counter(name: str, text: str, *more: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"prefetchshard_{name}", text, labels=[*labels, *more])

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"prefetchshard_{name}", text, labels=labels)

        return cls(
            counter("batches", "Batches handed out."),
            counter("rows", "Rows handed out, padding not counted."),
            counter("batch_bytes", "Bytes of the batches handed out."),
            counter("dropped_rows", "Rows of a remainder that was dropped."),
            counter("padded_rows", "Padding rows added."),
            counter("stall_seconds", "Time that the loop waited for a batch, by the stage that it waited for.", "stage"),
            counter("step_seconds", "Time that the loop spent in its own step."),
            counter("work_seconds", "Time that stages were at work, summed over threads.", "stage"),
            HistogramMetricFamily("prefetchshard_next_seconds", "How long next() took, but for the first batch.", labels=labels),
            gauge("ready_batches", "Batches ready on the devices."),
            gauge("ready_batches_limit", "The most that may be."),
            gauge("read_batches", "Batches that are read and wait for their transfer."),
            gauge("read_batches_limit", "The most that may be, with those that are being read."),
            gauge("reader_threads", "Reader threads."),
        )

    def add(self, labels: list[str], stats: Stats) -> None:
        for family, value in (
            (self.batches, stats.batches), (self.rows, stats.rows), (self.bytes, stats.bytes), (self.dropped, stats.dropped_rows),
            (self.padded, stats.padded_rows), (self.step, stats.busy_seconds), (self.ready, stats.ready.ready),
            (self.ready_limit, stats.ready.capacity), (self.read, stats.host.ready), (self.read_limit, stats.host.capacity),
            (self.threads, stats.workers),
        ):  # fmt: skip
            family.add_metric(labels, value)
        for stage, seconds in {"start-up": stats.start_up_seconds, **waits_of(stats)}.items():
            self.stall.add_metric([*labels, stage], seconds)
        for stage, seconds in (
            ("reading", stats.source_seconds), ("transform", stats.transform_seconds), ("copying", stats.copy_seconds),
            ("transferring", stats.transfer_seconds),
        ):  # fmt: skip
            self.work.add_metric([*labels, stage], seconds)
        self.next.add_metric(labels, _histogram(stats.next), stats.next.total)


def _histogram(durations: Distribution) -> list[tuple[str, float]]:
    """How many are not longer than each bound; the last is of all."""
    counts = [0] * len(UP_TO_SECONDS)
    for bucket, count in durations.buckets.items():
        for i, most in enumerate(UP_TO_SECONDS):
            if upper_of(bucket) <= most:
                counts[i] += count
                break
    return [
        *((str(most), float(count)) for most, count in zip(UP_TO_SECONDS, accumulate(counts), strict=True)),
        ("+Inf", float(durations.count)),
    ]
