"""tf.data: parallel map and prefetch in its own threads, then `device_put` two batches ahead, as Flax's examples do.

Arrays are gathered by TensorFlow itself; transforms and collate functions in Python run through `numpy_function`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    tf.config.set_visible_devices([], "GPU")
    make = {"arrays": _from_arrays, "examples": _from_python, "batches": _from_iterator}[workload.kind]
    return _ahead(make(workload, place, workers).prefetch(2).as_numpy_iterator(), place)


def _from_arrays(workload: Workload, place: Place, workers: int) -> tf.data.Dataset:
    tensors = {name: tf.constant(leaf) for name, leaf in workload.data.items()}
    rows = tf.data.Dataset.range(workload.length).shuffle(workload.length, seed=0).repeat().batch(workload.batch_size)
    return rows.map(lambda picked: {name: tf.gather(leaf, picked) for name, leaf in tensors.items()}, num_parallel_calls=workers)


def _from_python(workload: Workload, place: Place, workers: int) -> tf.data.Dataset:
    sample = workload.make(0)

    def make(step: Any) -> list[np.ndarray]:
        return list(workload.make(int(step)).values())

    def call(step: Any) -> dict[str, Any]:
        return dict(zip(sample, tf.numpy_function(make, [step], [leaf.dtype for leaf in sample.values()]), strict=True))

    return tf.data.Dataset.range(2**40).map(call, num_parallel_calls=workers, deterministic=True)


def _from_iterator(workload: Workload, place: Place, workers: int) -> tf.data.Dataset:
    signature = {name: tf.TensorSpec(leaf.shape, leaf.dtype) for name, leaf in workload.make(0).items()}
    return tf.data.Dataset.from_generator(lambda: host_batches(workload, place), output_signature=signature)


def _ahead(batches: Iterator[Any], place: Place) -> Iterator[Any]:
    ready = deque(map(place.put, islice(batches, 2)))
    while ready:
        yield ready.popleft()
        ready.extend(map(place.put, islice(batches, 1)))
