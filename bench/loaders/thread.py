"""A thread, a queue of two and `device_put`: what most people write by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    return in_thread(map(place.put, host_batches(workload, place)))


def in_thread(batches: Iterator[Any]) -> Iterator[Any]:
    """Runs an iterator in a thread, two items ahead."""
    ready: queue.Queue[Any] = queue.Queue(2)
    stopped = threading.Event()

    def run() -> None:
        try:
            for batch in batches:
                ready.put(batch)
                if stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            ready.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not isinstance(item := ready.get(), BaseException):
            yield item
        raise item
    finally:
        stopped.set()
        while thread.is_alive():  # it may wait for a place in the queue
            try:
                ready.get(timeout=0.01)
            except queue.Empty:
                continue
