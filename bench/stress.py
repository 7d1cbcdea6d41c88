"""Loads random data in random ways for a time, and compares every row of every batch on the devices with its source.

    python bench/stress.py --seconds 60 [--staging poison|default] [--seed N]

Half of the cases copy past the cache whatever can be copied so, the others nothing. On the CPU the staging memory is by default a ring that turns to poison as soon as it is released (`prefetchshard.testing`); on
accelerators the ring that loaders use there. Exit code: 0 all right, 1 wrong values or a failure, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import prefetchshard as ps
from bench.place import use_devices
from bench.stress_cases import Case, make_case
from bench.stress_sums import Sums, device_sums, host_sums
from prefetchshard.processes import worker_process
from prefetchshard.reading import batch_copying
from prefetchshard.streaming import choosing, copies
from prefetchshard.streaming.machine_code import CopyRows, NoMachineCode, make_copy_rows
from prefetchshard.testing import poisoned_staging

_jax: Any = jax
_jnp: Any = jnp

Array = NDArray[Any]

HANG_SECONDS = 120.0
"""A case that takes longer ends the program, with the stacks of all threads."""

CASES_PER_CLEARING = 25
"""Compiled functions are thrown away after so many cases: no two have the same shapes."""


@dataclasses.dataclass
class Tally:
    """What was done with one kind of source."""

    cases: int = 0
    runs: int = 0
    batches: int = 0
    rows: int = 0
    bytes: int = 0
    sums: int = 0
    wrong: int = 0
    failures: int = 0

    def add(self, other: Tally) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass
class Kept:
    """A batch that the consumer holds on to, with what its sums must be for as long as it lives."""

    step: int
    valid: int
    leaves: list[Any]
    wanted: list[Sums]


class Checker:
    """Runs one case and compares.

    Attributes:
        tally: what was done.
        faults: the first few differences, in words.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tally = Tally(cases=1)
        self.faults: list[str] = []
        self._kept: collections.deque[Kept] = collections.deque()
        self._done: list[Array] = []  # rows of the run so far, batch by batch
        self._before: list[Array] = []  # of the run that was broken off, from the same beginning

    def run(self) -> None:
        """Make the loader, break off some runs, and read one to its end."""
        loader, begun = self.case.loader(), False
        for stop in self.case.stops:
            loader, begun = self._broken_run(loader, stop, begun)
        self._run(iter(loader), None, goes_on=begun)
        self._check_epochs()
        while self._kept:
            self._recheck(self._kept.popleft())

    def _broken_run(self, loader: ps.Loader, stop: int, goes_on: bool) -> tuple[ps.Loader, bool]:
        iterator = iter(loader)
        ended = self._run(iterator, stop, goes_on=goes_on)
        if ended:  # the next run has other epochs
            self._done = []
            return loader, False
        if self.case.leaves_by == "state":
            saved = ps.LoaderState.decode(iterator.state().encode())
            iterator.close()
            return self.case.loader(state=saved), True
        if self.case.leaves_by == "close":
            iterator.close()
        del iterator
        return loader, False

    def _run(self, iterator: ps.LoaderIterator, limit: int | None, *, goes_on: bool) -> bool:
        """Read up to `limit` batches. Whether there are no more."""
        self.tally.runs += 1
        if not goes_on:
            self._before, self._done = self._done, []
        count = 0
        while limit is None or count < limit:
            batch = next(iterator, None)
            if batch is None:
                return True
            position = iterator.position
            assert position is not None
            self._check(batch, position)
            count += 1
        return False

    # -- one batch

    def _check(self, batch: Any, position: ps.Position) -> None:
        case = self.case
        leaves, mask = self._take_apart(batch)
        ids = np.asarray(leaves[0]).reshape(-1)
        valid = len(ids) if mask is None else int(mask.sum())
        if mask is not None and not mask[:valid].all():
            self._fault(1, f"step {position.step}: the mask is {mask}")
        self._check_order(ids[:valid], position)
        wanted = [case.data.sums(i, ids, valid, case.padding if _placed(leaf) else 0) for i, leaf in enumerate(leaves)]
        kept = Kept(position.step, valid, leaves, wanted)
        self._compare(kept, "")
        self.tally.batches += 1
        self.tally.rows += valid
        self.tally.bytes += case.data.row_bytes * len(ids)
        self._keep(kept)
        if case.donates:
            kept.leaves = []
            _use_up(leaves)
        if case.busy:
            _work()

    def _take_apart(self, batch: Any) -> tuple[list[Any], Array | None]:
        """The leaves in the order of the data, and the mask."""
        mask: Any = None
        if self.case.pads:
            batch, mask = (batch, batch.pop("mask")) if hasattr(batch, "pop") else batch
        flat = _jax.tree.leaves(batch)
        leaves: list[Any] = [None] * len(flat)
        for place, leaf in zip(self.case.data.order, flat, strict=True):
            leaves[place] = leaf
        return leaves, None if mask is None else np.asarray(mask).reshape(-1)

    def _compare(self, kept: Kept, when: str) -> None:
        sums = {i: device_sums(leaf, lead=self._lead(i)) for i, leaf in enumerate(kept.leaves) if _placed(leaf)}
        for i, (leaf, wanted) in enumerate(zip(kept.leaves, kept.wanted, strict=True)):
            targets = self.case.data.targets
            found = np.asarray(sums[i]) if i in sums else host_sums(leaf.astype(targets[i]), lead=self._lead(i))
            wanted = wanted[: kept.valid] if i in self.case.rowless else wanted
            self.tally.sums += len(wanted)
            if found.size != wanted.size or leaf.dtype not in (targets[i], self.case.data.leaves[i].dtype):
                self._fault(wanted.size, f"step {kept.step}, leaf {i}: {leaf.dtype}{list(leaf.shape)}{when}")
                continue
            wrong = np.flatnonzero(found.reshape(-1) != wanted)
            if len(wrong):
                self._fault(len(wrong), f"step {kept.step}, leaf {i} {leaf.dtype}{list(leaf.shape)}{when}: rows {_some(wrong)} are wrong")

    def _lead(self, leaf: int) -> int:
        """How many axes in front make the rows of a leaf."""
        return 2 if self.case.options.get("microbatches") and leaf not in self.case.rowless else 1

    def _fault(self, count: int, words: str) -> None:
        self.tally.wrong += count
        if len(self.faults) < 5:
            self.faults.append(words)

    def _keep(self, kept: Kept) -> None:
        keep = self.case.keep
        self._kept.append(kept)
        while keep is not None and len(self._kept) > keep:
            old = self._kept.popleft()
            if keep:
                self._recheck(old)

    def _recheck(self, kept: Kept) -> None:
        if kept.leaves:
            self._compare(kept, " (held on to)")

    # -- the order

    def _check_order(self, ids: Array, position: ps.Position) -> None:
        case = self.case
        step, self_rows = len(self._done), case.rows_of_epoch()
        self._done.append(ids)
        if not case.options.get("shuffle"):
            first = sum(map(len, self._done[:-1])) % self_rows
            right = np.arange(first, first + len(ids))
        else:
            right = self._before[step] if step < len(self._before) else ids
        if not np.array_equal(ids, right):
            self._fault(len(ids), f"step {position.step}: rows {_some(ids)}, and not {_some(right)}")

    def _check_epochs(self) -> None:
        """Every row once an epoch."""
        case, each = self.case, self.case.rows_of_epoch()
        rows = np.concatenate([*self._done, np.zeros(0, np.int32)])
        epochs = case.options["epochs"]
        if len(rows) != each * epochs:
            self._fault(abs(len(rows) - each * epochs), f"{len(rows)} rows in {epochs} epochs of {each}")
            return
        for epoch in range(epochs):
            some = rows[epoch * each : (epoch + 1) * each]
            if len(np.unique(some)) != each:
                self._fault(each, f"epoch {epoch}: rows come twice: {_some(some)}")


def _placed(leaf: Any) -> bool:
    """Whether it is on the devices; else it stayed on the host."""
    return isinstance(leaf, jax.Array)


def _some(rows: Array) -> str:
    return f"{rows[:6].tolist()}{f' and {len(rows) - 6} more' if len(rows) > 6 else ''}"


def _changed(leaves: list[Any]) -> list[Any]:
    return [_jnp.logical_not(leaf) if leaf.dtype == bool else leaf * 2 for leaf in leaves]


_change = _jax.jit(_changed, donate_argnums=0)
_busy = _jax.jit(lambda x: x @ x @ x @ x)  # pyright: ignore[reportUnknownLambdaType]


def _use_up(leaves: list[Any]) -> None:
    """Give the memory of a batch to a function that writes to it."""
    _jax.block_until_ready(_change([leaf for leaf in leaves if _placed(leaf) and leaf.dtype.kind in "biuf"]))


def _work() -> None:
    """Let the first device work."""
    _busy(np.ones((512, 512), np.float32))


# -- the program


def run_case(seed: int, number: int, *, poison: bool) -> Checker:
    """The case of this number, and what came of it."""
    random = np.random.default_rng([seed, number])
    checker = Checker(make_case(random))
    streams = bool(random.random() < 0.5)
    batch_copying.HAND_OVER_SECONDS = -1.0 if random.random() < 0.5 else 0.001  # half of them as if the source were slow
    worker_process.MAY_WORK_BEFORE = bool(random.random() < 0.2)
    try:
        with poisoned_staging() if poison else contextlib.nullcontext(), _streaming_copies(streams):
            checker.run()
    except Exception:  # noqa: BLE001 - it is said, and the program goes on with the next case
        checker.tally.failures += 1
        checker.faults.append(traceback.format_exc())
    return checker


@contextlib.contextmanager
def _streaming_copies(on: bool) -> Iterator[None]:
    """Every copy past the cache that can go so, whatever its size; or none."""
    copy_rows = _copy_rows() if on else None
    with (
        mock.patch.multiple(
            choosing, LEAST_BYTES=1, LEAST_BYTES_ON_CPU=1, is_decided=_decided, streaming_if_faster=lambda are_read: copy_rows
        ),
        mock.patch.object(copies, "LEAST_ROW_BYTES", 1),
    ):
        yield


def _decided(are_read: bool) -> bool:
    del are_read
    return True


@functools.cache
def _copy_rows() -> CopyRows | None:
    try:
        return make_copy_rows()
    except NoMachineCode as reason:
        print(f"no streaming copies: {reason}")
        return None


def run(seconds: float, seed: int, *, poison: bool, first: int = 0, most: int | None = None) -> dict[str, Tally]:
    """Run up to `most` cases for a time, from the case `first` on. By kind of source what was done."""
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    end = time.monotonic() + seconds
    number = first
    while time.monotonic() < end and (most is None or number < first + most):
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        checker = run_case(seed, number, poison=poison)
        faulthandler.cancel_dump_traceback_later()
        tallies[checker.case.kind].add(checker.tally)
        if checker.faults:
            print(f"\ncase {number} (--seed {seed} --case {number}): {checker.case}", *checker.faults, sep="\n  ", flush=True)
        number += 1
        if number % CASES_PER_CLEARING == 0:
            _jax.clear_caches()
            gc.collect()
    return dict(sorted(tallies.items()))


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """The lines of the table, the last one over all."""
    names = [field.name for field in dataclasses.fields(Tally)]
    total = Tally()
    yield f"{'source':<16}" + "".join(f"{'MB' if name == 'bytes' else name:>10}" for name in names)
    for tally in tallies.values():
        total.add(tally)
    for kind, tally in [*tallies.items(), ("all", total)]:
        values = [f"{getattr(tally, name) / 1e6:.0f}" if name == "bytes" else f"{getattr(tally, name)}" for name in names]
        yield f"{kind:<16}" + "".join(f"{value:>10}" for value in values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--staging", choices=("poison", "default"), help="default: poison on the CPU, else what loaders use")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there is no accelerator")
    options = parser.parse_args(arguments)
    use_devices(options.devices)
    seed = int(time.time()) if options.seed is None else options.seed
    platform = _jax.devices()[0].platform
    staging = options.staging or ("poison" if platform == "cpu" else "default")
    print(f"{len(_jax.devices())} devices ({_jax.devices()[0].device_kind}), {staging} staging, --seed {seed}", flush=True)
    alone = {} if options.case is None else {"first": options.case, "most": 1}
    try:
        tallies = run(options.seconds, seed, poison=staging == "poison", **alone)
    except KeyboardInterrupt:
        return 130
    print("\n" + "\n".join(table(tallies)))
    wrong = sum(tally.wrong + tally.failures for tally in tallies.values())
    print(f"{wrong} wrong values or failures" if wrong else "no wrong value", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
