"""Whether what arrived is what was sent: every row's probe, the order, and some batches in full."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bench.data import Batch, Probe, Workload
from bench.place import Place


class WrongValuesError(Exception):
    """A batch that is not what the source gave."""


def check(workload: Workload, place: Place, probes: list[Probe], kept: dict[int, Any], *, plain: bool = True) -> dict[str, int]:
    """After the measurement, so that it costs nothing there.

    Args:
        workload: what was loaded.
        place: where it had to arrive.
        probes: what was read of each batch on the devices, from the first one on; none of unlabelled batches.
        kept: some batches by number, held since they arrived: one that its loader overwrote later shows.
        plain: the leaves are `(rows, ...)`; else they have the devices as a leading axis.

    Returns:
        How many rows were checked by probe, and how many batches in full.

    Raises:
        WrongValuesError: with the first difference.
    """
    rows = check_probes(workload, probes) if workload.labelled else 0
    for number, batch in kept.items():
        check_batch(workload, place, number, batch, plain)
    return {"rows_probed": rows, "batches_compared": len(kept)}


def check_probes(workload: Workload, probes: list[Probe]) -> int:
    """Every row that arrived, and their order.

    Raises:
        WrongValuesError: with the first difference.
    """
    wanted = workload.probes()
    arrived = [Probe(*(np.asarray(part).reshape(-1) for part in probe)) for probe in probes]
    for number, probe in enumerate(arrived):
        labels = probe.label
        if len(labels) != workload.batch_size or labels.min() < 0 or labels.max() >= workload.length:
            raise WrongValuesError(f"batch {number}: {len(labels)} rows, numbered {labels.min()} to {labels.max()}")
        for name in ("first", "last"):
            wrong = np.flatnonzero(getattr(probe, name) != getattr(wanted, name)[labels])
            if len(wrong):
                raise WrongValuesError(f"batch {number}: the {name} value of {len(wrong)} rows is wrong, e.g. at position {wrong[0]}")
        if workload.kind == "batches" and not np.array_equal(labels, workload.rows(number)):
            raise WrongValuesError(f"batch {number} is out of order")
    _check_epochs(workload, [probe.label for probe in arrived])
    return sum(len(probe.label) for probe in arrived)


def _check_epochs(workload: Workload, labels: list[np.ndarray]) -> None:
    """Each row once an epoch, in whatever order; of "batches" the order itself was checked."""
    steps = workload.order.steps
    if workload.kind == "batches":
        return
    for first in range(0, len(labels), steps):
        seen = np.concatenate(labels[first : first + steps])
        if len(np.unique(seen)) != len(seen):
            raise WrongValuesError(f"{len(seen) - len(np.unique(seen))} rows came twice within the epoch from batch {first} on")


def check_batch(workload: Workload, place: Place, number: int, batch: Any, plain: bool) -> None:
    """One batch in full: every value of every leaf, and where it lies.

    Raises:
        WrongValuesError: with the first difference.
    """
    if workload.labelled:
        wanted = workload.make_of(np.asarray(batch["label"]).reshape(-1))
    else:
        wanted = workload.make(number)
    if set(batch) != set(wanted):
        raise WrongValuesError(f"batch {number} has the leaves {sorted(batch)}, not {sorted(wanted)}")
    for name, leaf in batch.items():
        _check_leaf(f'batch {number}, leaf "{name}"', leaf, name, wanted, place, plain)


def _check_leaf(what: str, leaf: Any, name: str, wanted: Batch, place: Place, plain: bool) -> None:
    if not isinstance(leaf, jax.Array) or set(leaf.devices()) != set(place.devices):
        raise WrongValuesError(f"{what} is not on the devices")
    if plain and not leaf.sharding.is_equivalent_to(place.sharding, leaf.ndim):
        raise WrongValuesError(f"{what} has the sharding {leaf.sharding}")
    value = np.asarray(leaf)
    value = value if plain else value.reshape(-1, *value.shape[2:])
    if value.dtype != wanted[name].dtype or value.shape != wanted[name].shape:
        raise WrongValuesError(f"{what} is {value.dtype}{list(value.shape)}, not {wanted[name].dtype}{list(wanted[name].shape)}")
    if not np.array_equal(value, wanted[name]):
        raise WrongValuesError(f"{what}: {np.count_nonzero(value != wanted[name])} values of {value.size} are wrong")
