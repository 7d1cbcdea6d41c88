"""What a user may choose, and the checks that need nothing but the values themselves."""

from __future__ import annotations

import enum
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np

from prefetchshard.base.codec import shown
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.signatures import is_async, misfit, takes_parameter

MOST_ROWS = 2**63 - 1
"""Of a batch: a state holds the number in 64 bits."""

MOST_WORKERS = 1024
"""Threads beyond this only wait for each other. Systems and containers allow a process some thousand, and each batch that one of them
reads takes memory of its own."""

MOST_PROCESSES = 256
"""Each takes some ten megabytes at least, and an interpreter's start-up."""

MOST_SECONDS = 1e9
"""Thirty years; integers go on where floats cannot follow."""

Narrow: TypeAlias = Literal["check", "error", "allow"]


class _Host(enum.Enum):
    """As a sharding: this leaf (or everything below this place of the batch) stays on the host, untouched.

    Example:
        examples = [{"x": np.ones(2, np.float32), "name": f"row {i}"} for i in range(8)]
        (batch,) = ps.Loader(examples, {"x": P("data"), "name": ps.HOST}, batch_size=8)
        assert batch["name"][3] == "row 3"
    """

    HOST = "HOST"

    def __repr__(self) -> str:
        return "ps.HOST"

    __str__ = __repr__


HOST: Final = _Host.HOST
HostType: TypeAlias = Literal[_Host.HOST]


class PerDevice(msgspec.Struct, frozen=True):
    """A batch size of `rows` times the number of devices along the batch axes of the sharding.

    Example:
        rows = np.zeros((64, 3), np.float32)
        batch = next(iter(ps.Loader(rows, P("data"), batch_size=ps.PerDevice(4))))
        assert batch.shape == (4 * jax.device_count(), 3)
    """

    rows: int

    def __post_init__(self) -> None:
        at_least("PerDevice(rows)", self.rows, 1, most=MOST_ROWS)
        _plain_integers(self)


class Processes(msgspec.Struct, frozen=True):
    """As `workers=`: so many worker processes, each under a reader thread, for Python code that holds the interpreter's lock.

    They read a dataset and run `transform` and `collate`; what they make comes back in shared memory. Batches are the same as with threads.
    Processes are spawned when a run begins, never forked, and end with it. The source and the functions are sent to each of them once, by
    pickle (cloudpickle, where it is installed, for lambdas and what is defined in notebooks); large arrays among them lie in memory that
    all processes share, and memory-mapped arrays travel as their file. Until the processes are ready, one thread of this process makes the
    first batches. Arrays without `transform`, and iterators without `transform` and `collate`, are read by threads all the same.

    A program that is run as a script is imported by each process, unless neither source nor functions are defined in it: what it does by
    itself belongs under `if __name__ == "__main__":`. Code that uses JAX in a worker process finds the CPU alone there.

    Args:
        n: how many.

    Example:
        examples = [{"x": np.full(3, row, np.float32)} for row in range(64)]
        loader = ps.Loader(examples, P("data"), batch_size=16, workers=ps.Processes(2))
        assert [int(batch["x"][0, 0]) for batch in loader] == [0, 16, 32, 48]
    """

    n: int

    def __post_init__(self) -> None:
        at_least("Processes(n)", self.n, 1, most=MOST_PROCESSES)
        _plain_integers(self)


class Pad(msgspec.Struct, frozen=True):
    """The remainder policy that fills the last batch to its full shape.

    Args:
        mask_key: the key of the boolean row mask in a mapping batch; a key that the batch has already is an error.
        value: what padding rows hold, in the dtype of each leaf, which must be able to hold it.

    Example:
        source = {"x": np.ones((12, 3), np.float32)}
        *_, last = ps.Loader(source, P("data"), batch_size=8, remainder=ps.Pad(mask_key="valid"))
        assert last["valid"].sum() == 4
    """

    mask_key: str = "mask"
    value: float | int | bool = 0

    def __post_init__(self) -> None:
        if not isinstance(self.mask_key, str) or not self.mask_key:  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise ConfigError(f"Pad(mask_key={shown(self.mask_key)}): a non-empty string")
        if not isinstance(self.value, (numbers.Real, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            raise ConfigError(f"Pad(value={shown(self.value)}): a number, or True or False")


Remainder: TypeAlias = Literal["auto", "drop", "keep", "error", "pad"] | Pad


Policy: TypeAlias = Literal["drop", "keep", "error"] | Pad
"""A remainder policy as the stages see it."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a loader that can be checked by themselves.

    Raises:
        ConfigError: names the argument, the value and what is allowed.
    """

    batch_size: int | PerDevice | None
    remainder: Remainder
    shuffle: bool
    seed: int
    epochs: int | None
    collate: Callable[[Any], Any] | None
    transform: Callable[..., Any] | None
    device_transform: Callable[..., Any] | None
    microbatches: int | None
    workers: int | Literal["auto"] | Processes
    reuses_buffers: bool
    depth: int | Literal["auto"]
    read_ahead: int | None = None
    narrow: Narrow
    device_memory: int | None
    host_memory: int | None
    snapshot_every: int | None = 1
    stall_warning_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, PerDevice):
            at_least("batch_size", self.batch_size, 1, most=MOST_ROWS, optional=True)
        if not isinstance(self.remainder, Pad):
            _one_of("remainder", self.remainder, ("auto", "drop", "keep", "error", "pad"), " or ps.Pad(...)")
        _one_of("narrow", self.narrow, ("check", "error", "allow"))
        if not _is_auto(self.depth):
            at_least("depth", self.depth, 1, "; 'auto' to follow the run")
        at_least("read_ahead", self.read_ahead, 1, "; None: as far as the other settings allow", optional=True)
        at_least("seed", self.seed, 0)
        at_least("epochs", self.epochs, 1, "; None for ever", optional=True)
        at_least("microbatches", self.microbatches, 1, optional=True)
        at_least("snapshot_every", self.snapshot_every, 1, "; None: never", optional=True)
        _seconds("stall_warning_seconds", self.stall_warning_seconds)
        if not isinstance(self.workers, Processes) and not _is_auto(self.workers):
            at_least("workers", self.workers, 1, "; 'auto' to choose, or ps.Processes(n)", most=MOST_WORKERS)
        _booleans(shuffle=self.shuffle, reuses_buffers=self.reuses_buffers)
        item = "one batch" if self.batch_size is None else "one example"
        _function("transform", self.transform, item, "rng")
        _function("collate", self.collate, "a list of examples")
        _function("device_transform", self.device_transform, "one batch", "key")
        if self.collate is not None and self.batch_size is None:
            raise ConfigError("collate makes a batch from examples, so it needs batch_size=...; for whole batches use `transform`")
        _plain_integers(self)

    @property
    def pad(self) -> Pad | None:
        """The padding policy, or None."""
        if self.remainder == "pad":
            return Pad()
        return self.remainder if isinstance(self.remainder, Pad) else None

    @property
    def policy(self) -> Policy:
        """The remainder policy: what "auto" stands for, and "pad" spelt out."""
        if self.remainder == "auto":
            return "keep" if self.batch_size is None else "drop"
        return self.pad or cast("Policy", self.remainder)


def at_least(name: str, value: object, least: int, more: str = "", *, most: int | None = None, optional: bool = False) -> None:
    """Check that a value is an integer.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if optional and value is None:
        return
    if most is not None and isinstance(value, numbers.Integral) and int(value) > most:
        raise ConfigError(f"{name}={shown(value)}: an integer from {least} to {most}{more}")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ConfigError(f"{name}={shown(value)}: an integer, at least {least}{more}")


def _plain_integers(struct: msgspec.Struct) -> None:
    """NumPy's integers as Python's: they overflow, and no state can hold them."""
    for name in struct.__struct_fields__:
        value: Any = getattr(struct, name)
        if issubclass(type(value), np.integer):
            msgspec.structs.force_setattr(struct, name, int(value))


def _seconds(name: str, value: object) -> None:
    if value is None:
        return
    number = 0 if isinstance(value, bool) or not isinstance(value, numbers.Real) else cast("float", value)
    if not (0 < number <= MOST_SECONDS or number == math.inf):
        raise ConfigError(f"{name}={shown(value)}: a positive number of seconds; None: never")


def _booleans(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={shown(value)}: True or False")


def _function(name: str, value: object, gets: str, extra: str | None = None) -> None:
    if value is None:
        return
    if not callable(value):
        raise ConfigError(f"{name}={shown(value)}: a function")
    if is_async(value):
        raise ConfigError(f"{name} is an async function, and nobody awaits it: make it a plain one, or do this in an async source")
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise ConfigError(f"{name} is a generator function: return its result instead of yielding it")
    options = {extra: None} if extra is not None and takes_parameter(value, extra) else {}
    why = misfit(value, None, **options)
    if why is not None:
        also = f" and {extra}=" if options else ""
        raise ConfigError(f"{name} is called with {gets}{also}, and cannot be: {why}; bind what else it needs by functools.partial")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"  # an array would compare each of its entries


def _one_of(name: str, value: object, allowed: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={shown(value)}: one of {', '.join(map(repr, allowed))}{more}")
