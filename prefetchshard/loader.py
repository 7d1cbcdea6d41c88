"""`Loader`: what to read and where to put it."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, Self, TypeVar

from prefetchshard.base.clock import MONOTONIC
from prefetchshard.base.config import Narrow, PerDevice, Processes, Remainder, Settings
from prefetchshard.base.errors import ConfigError, UsedUpError
from prefetchshard.base.event_loop import HomeLoop
from prefetchshard.base.limits import parse_bytes
from prefetchshard.base.specs import BatchSpec
from prefetchshard.building.other_names import explained
from prefetchshard.building.run_factory import RunFactory
from prefetchshard.consumer import Consumer
from prefetchshard.iterator import Batch_co, LoaderIterator
from prefetchshard.measuring.stats import Stats
from prefetchshard.queues import async_waiting as aio
from prefetchshard.resuming.handed_out import HandedOut
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.closing import close_runs
from prefetchshard.running.run import Run

__all__ = ["Loader", "prefetch"]

Params = ParamSpec("Params")
Made = TypeVar("Made")


class _Begun(NamedTuple):
    """A run that was started: what the user gets of it, and what the loader does."""

    iterator: LoaderIterator[Any]
    consumer: Consumer


class Loader(Generic[Batch_co]):
    """Reads a source ahead and keeps the next sharded batches on the devices while a step runs.

    A loader says what to read and where to put it. It starts no thread by itself; `iter(loader)` and `aiter(loader)` start a run.
    `ps.Loader[Batch]` says what a batch is, for type checkers; unsaid it is what `device_transform` returns, or Any.

    Example:
        arrays = {"x": np.zeros((64, 3), np.float32), "y": np.zeros(64, np.int32)}
        loader = ps.Loader(arrays, P("data"), batch_size=16, shuffle=True, epochs=2)
        for batch in loader:
            assert batch["x"].shape == (16, 3)

    Args:
        source: arrays (a NumPy array, or a mapping, tuple or registered container of them, of one leading size; in `ps.OnDevice` they
            stay on the devices), a dataset
            (`__len__` and `__getitem__`, read by several threads at once), an iterable, an iterator, an async iterable (a run begun by
            `aiter` pulls it in the running event loop, one begun by `iter` in a loop of its own; `ps.from_this_loop` and
            `ps.in_own_loop` choose), or a function that returns any of these, called once an epoch (with `epoch=` where it has such a
            parameter).
        sharding: where each leaf goes: a `jax.sharding.Sharding`; a 1-D `Mesh`; a `PartitionSpec` (with the mesh of `jax.set_mesh` or
            of the older `with mesh:`, else, where it names one axis, over all devices); a pytree prefix of these over the batch; a
            function `(path, shape, dtype) -> one of these`; `ps.HOST`. None, for the whole, in a tree or from a function: the rows are
            split over all devices of the mesh of the other leaves, where they have one; else the leaf goes to the default device, where
            one is in force; else the rows are split over all devices of the mesh in force, or over all devices that there are.
            `PartitionSpec()` means replicated.
        host: paths of leaves that stay on the host, unchanged, as `ps.HOST` in their places of `sharding` says, without a tree for the
            rest: `host=("text", "meta.id")`, written as `describe`, `spec()` and errors write them. The path of a container is for
            everything in it.
        batch_size: rows of one step over all devices of all processes; `ps.PerDevice(n)`; None: the source yields whole batches.
        collate: makes a batch from a list of examples; default: each leaf is stacked to `(rows, *example)`. For arrays without
            `transform` it gets the gathered batch.
        remainder: what becomes of a last batch that is not full: "drop": it is left out, and counted in `stats()`; "keep": it comes as it
            is, where its sharding can split it; "error"; "pad", or `ps.Pad(mask_key=..., value=...)`: filled to the full shape, with a
            boolean row mask `(rows,)` on every batch, under "mask" of a mapping, else as `(batch, mask)`. "auto" is "drop" with
            batch_size and "keep" without. Without batch_size the others concern a last batch with fewer rows than the first, by the
            leaves that the sharding splits, else by those that differ from the first batch; "pad" fills any batch as far as its sharding
            needs.
        shuffle: each epoch has an order of its own, from `(seed, epoch)` alone; needs random access.
        seed: of shuffle, of `rng` and of `key`; a non-negative integer.
        epochs: epochs in one run; None for ever.
        transform: on the host, in the workers, on one example (on a batch where batch_size is None); a parameter named `rng` gets a
            `numpy.random.Generator` made from `(seed, epoch, row)`. It and `collate` get arrays and lists of their own, and may change them.
        device_transform: jitted, on the devices, on the batch after its transfer; a parameter named `key` gets a PRNG key of the step.
            Over several devices it is dispatched by the thread that takes the batch, which should be the one of the training step.
        microbatches: k: leaves with rows become `(k, rows / k, *example)`, axis 0 not sharded; with batch_size those on the host too.
        workers: reader threads. "auto": their number follows the run. There are more while the loop waits for them and each one pays, up
            to the CPUs where they compute, and up to 48 where they wait (for files, a network); fewer where they are not needed, or only
            wait for each other to give Python's lock back. Each change is logged with its reason, at the level INFO; `stats().workers` is
            the present number. An integer is fixed. All of them read a dataset. One that gives wrong rows then is most often found
            by its first reads, and is a SourceError; see `per_worker`. `ps.Processes(n)`: n worker processes under as many threads.
        reuses_buffers: the source may overwrite what it yielded as soon as it is asked for the next item (a dataset: asked in the same
            thread), so an item is copied before that; but not a batch of NumPy arrays that nobody refers to any more, as CPython counts
            it: that is copied while the source goes on. jax.Arrays are copied where they lie in host memory, as on the CPU backend,
            which JAX may share with NumPy arrays. False: the source never does, so that pulling and copying may always overlap,
            and what stays on the host is the source's own.
        depth: batches ready on the devices ahead of the one in use, at least 1. "auto": the first run begins with 2, the next one with what the
            one before ended with. It becomes four times as many where the loop waits now and then although all places had been filled
            before, so that batches that take longer than others are evened out. At most 32, and more than 2 only in a sixteenth of a
            device's memory. What brought nothing is undone, and what was not used for a minute is given up; each change is logged with
            its reason, at the level INFO, and `stats().ready.capacity` is the present number.
        read_ahead: the most batches that are ever read from the source and not yet delivered, at least 1 (2 where a short batch has to
            wait for the next one: an iterator of whole batches under another remainder than "keep"). It is exact: when `next` has returned
            k batches, the source was asked for items of the batches up to k + read_ahead, and for no item after them. None: as far as
            `depth` and the memory for reading allow; `spec().ahead` says how far that is.
        device_memory: bound, in bytes ("2GiB", or a number), on what is ahead of the batch in use on each device; lowers `depth` where
            needed. What cannot be kept to is an error, here where the source is arrays, else with the first batch.
        host_memory: bound, in bytes, on the batches that are being read or wait in staging memory.
        narrow: 64-bit leaves while x64 is off: "check": integers must survive, floats may round but not overflow, else an error that
            names leaf, row and value; "error": no such leaves; "allow": as JAX does it, silently.
        state: where to go on, from `state()` of a loader of the same data and the same seed, shuffle, batch size and remainder; devices,
            workers and depth may be others. `state.rebatch(n)` goes on with another batch size.
        snapshot_every: for sources with a state of their own (`get_state` and `set_state`, or `state_dict` and `load_state_dict`): it is
            saved every n batches, and resuming reads at most n - 1 of them again; None: never.
        stall_warning_seconds: a `next()` that waits longer says so in the log, once: which stage holds the batch, since when, and where the
            thread is that works on it; None: never.

    Raises:
        ConfigError: what cannot work, as far as it can be known here.
        ArgumentError: an argument that is not there; the text says what to write for names of other libraries.
        StateError: `state` does not fit; the text names the field and both values.
        PlacementError: arrays that do not fit their sharding.
        UsedUpError: the source is a generator that was read to its end before, or closed.

    Thread safety: every method may be called from any thread.
    """

    @explained
    def __init__(
        self,
        source: Any,
        sharding: Any = None,
        *,
        host: str | Sequence[str] = (),
        batch_size: int | PerDevice | None = None,
        collate: Callable[[Any], Any] | None = None,
        remainder: Remainder = "auto",
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        transform: Callable[..., Any] | None = None,
        device_transform: Callable[..., Batch_co] | None = None,
        microbatches: int | None = None,
        workers: int | Literal["auto"] | Processes = "auto",
        reuses_buffers: bool = True,
        depth: int | Literal["auto"] = 2,
        read_ahead: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        narrow: Narrow = "check",
        state: LoaderState | None = None,
        snapshot_every: int | None = 1,
        stall_warning_seconds: float | None = 60.0,
    ) -> None:
        settings = Settings(
            batch_size=batch_size,
            collate=collate,
            remainder=remainder,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            transform=transform,
            device_transform=device_transform,
            microbatches=microbatches,
            workers=workers,
            reuses_buffers=reuses_buffers,
            depth=depth,
            read_ahead=read_ahead,
            narrow=narrow,
            device_memory=parse_bytes("device_memory", device_memory),
            host_memory=parse_bytes("host_memory", host_memory),
            snapshot_every=snapshot_every,
            stall_warning_seconds=stall_warning_seconds,
        )
        self._factory = RunFactory(source, sharding, host, settings, MONOTONIC)
        self._lock = threading.RLock()  # guards the start of runs
        self._runs: list[tuple[weakref.ref[Consumer], Run]] = []
        self._only: _Begun | None = None  # the run over a one-shot source
        self._asked: _Begun | None = None  # a run that `spec` started, for the next `iter`
        if state is not None:
            self._factory.go_on_from(state)
        self._last = HandedOut(self._factory.next_start)  # of the run that was started last
        self._last_run: Run | None = None

    def __iter__(self) -> LoaderIterator[Batch_co]:
        return self._begin(None)

    def __aiter__(self) -> LoaderIterator[Batch_co]:
        return self._begin(self._factory.loop_here())

    def _begin(self, began_in: HomeLoop | None) -> LoaderIterator[Batch_co]:
        self._factory.check_process()
        with self._lock:
            if self._only is not None:
                return self._the_only_run(self._only).iterator
            return (self._take_over() or self._start(began_in)).iterator

    def _start(self, began_in: HomeLoop | None) -> _Begun:
        consumer = Consumer(self._factory, began_in)
        begun = _Begun(LoaderIterator(consumer), consumer)
        self._runs = [(ref, run) for ref, run in self._runs if ref() is not None or not run.threads.is_gone]
        self._runs.append((weakref.ref(consumer), consumer.run))
        self._last, self._last_run = consumer.handed_out, consumer.run
        if self._factory.one_shot:
            self._only = begun
        try:
            consumer.run.start()  # last: what Ctrl-C leaves of it is known here
        except BaseException:
            if not self._factory.one_shot:  # else the next `iter` gets it: nothing that was read is lost
                consumer.run.abandon()
            raise
        return begun

    def _the_only_run(self, begun: _Begun) -> _Begun:
        if begun.consumer.is_live:
            begun.consumer.run.start()  # Ctrl-C may have cut off the `iter` that made it
            return begun
        raise UsedUpError(
            "the source is a one-shot iterator, exhausted by an earlier run of this loader (or closed): pass something that can be "
            "iterated again, or a function that makes a new iterator each epoch"
        )

    def _live(self) -> list[Consumer]:
        """Of the runs that have neither ended nor failed nor been closed."""
        consumers = [ref() for ref, _ in self._runs]
        return [consumer for consumer in consumers if consumer is not None and consumer.is_live]

    def stats(self, *, last_seconds: float | None = None) -> Stats:
        """The statistics of the only live run; of none: of the last one.

        Args:
            last_seconds: None: all of the run. Else of about the last so many seconds, up to 600; see `LoaderIterator.stats`.

        Raises:
            ConfigError: several runs are live (ask the iterator), or there was none; or `last_seconds` is not above 0, or above 600.
        """
        live = self._live()
        if len(live) > 1:
            raise ConfigError(f"{len(live)} runs of this loader are live: ask the iterator, iter(loader).stats()")
        if live:
            return live[0].run.stats(last_seconds)
        if self._last_run is None:
            raise ConfigError("this loader has not run yet")
        return self._last_run.stats(last_seconds)

    def state(self) -> LoaderState:
        """The state of the only live run; of none: where the run that was started last stopped.

        A run that ended by itself stopped at the beginning of the next one. One that was closed, left by `break`, or that failed
        stopped after the last batch that it had handed out: to go on from there, make a loader with that state; this loader's own next
        run starts over. Of a loader that never ran it is where its first run will begin: what `state=` gave comes back as it was.

        Raises:
            ConfigError: several runs are live: ask the iterator.
        """
        live = self._live()
        if len(live) > 1:
            raise ConfigError(f"{len(live)} runs of this loader are live: ask the iterator, iter(loader).state()")
        return live[0].state() if live else self._last.state(self._factory.fingerprint)

    def spec(self) -> BatchSpec:
        """What a batch looks like: path to shape, dtype, sharding and bytes a device.

        Where it cannot be told without reading, a run is started, and taken over by the next `iter` or `aiter`: no batch is lost. An async
        source stays in the event loop in which it was begun here, one of its own; see `aspec`.

        Raises:
            BatchError: the source has no batch.
        """
        leaves = self._factory.specs.known()
        if leaves is None:
            consumer = self._run_to_look_at(None)
            try:
                leaves = consumer.learn_spec()
            except BaseException:
                self._asked = None  # nothing to take over
                raise
            finally:
                del consumer
        return BatchSpec(leaves, self._factory.ahead)

    async def aspec(self) -> BatchSpec:
        """`spec` without blocking the event loop, which then pulls an async source, as in a run that `aiter` begins.

        Raises:
            BatchError: the source has no batch.
        """
        leaves = self._factory.specs.known()
        if leaves is None:
            consumer = self._run_to_look_at(self._factory.loop_here())
            try:
                leaves = await consumer.learn_spec_async()
            except Exception:
                self._asked = None  # nothing to take over
                raise
            finally:
                del consumer
        return BatchSpec(leaves, self._factory.ahead)

    def _run_to_look_at(self, began_in: HomeLoop | None) -> Consumer:
        self._factory.check_process()
        with self._lock:
            if self._only is not None:
                return self._the_only_run(self._only).consumer
            begun = self._take_over() or self._start(began_in)
            self._asked = None if self._factory.one_shot else begun
            return begun.consumer

    def _take_over(self) -> _Begun | None:
        """The run that `spec` started, unless other JAX settings are in force now."""
        begun, self._asked = self._asked, None
        if begun is None or not begun.consumer.is_live:
            return None
        if begun.consumer.is_under_these_settings():
            return begun
        begun.consumer.run.close()
        return None

    def __len__(self) -> int:
        """Steps of the next run.

        Where the source makes the batches it is the number of these. A last one that turns out short, and is dropped, is counted too,
        except in a list, which can be looked at.

        Raises:
            TypeError: it is not known (no length, or epochs=None).
        """
        return self._factory.steps()

    def __bool__(self) -> bool:
        """Always true: `if loader:` asks whether there is one, and many have no length."""
        return True

    def close(self) -> None:
        """Close every live run. The loader may be iterated again, unless its source is one-shot."""
        close_runs(self._all_runs())

    def _all_runs(self) -> list[Run]:
        """Also those whose iterator nobody holds any more, while their threads are about to end."""
        runs = [run for _, run in self._runs]
        self._asked = None
        return runs

    async def aclose(self) -> None:
        """`close` without blocking the event loop, also while the task is being cancelled."""
        await aio.in_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        close_runs(self._all_runs())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await aio.in_thread(self.close)

    def __repr__(self) -> str:
        live = self._live()
        state = f"{len(live)} live run{'s' if len(live) != 1 else ''}" if live else self._factory.rest()
        return f"<Loader over {self._factory.describe()}: {state}>"


def _with_arguments_of(make: Callable[Params, Made]) -> Callable[[Callable[..., Any]], Callable[Params, Made]]:
    """For a function that passes its arguments on: type checkers and `inspect.signature` see those of what it calls."""

    def decorate(function: Callable[..., Any]) -> Callable[Params, Made]:
        function.__signature__ = inspect.signature(make).replace(return_annotation=make)
        return function

    return decorate


@_with_arguments_of(Loader)
def prefetch(*args: Any, **options: Any) -> Loader:
    """`Loader`, with all its arguments, under the name that reads well around an iterator.

    Example:
        batches = ({"x": np.full((16, 3), i, np.float32)} for i in range(10))
        for batch in ps.prefetch(batches, P("data")):
            assert batch["x"].shape == (16, 3)
    """
    return Loader(*args, **options)
