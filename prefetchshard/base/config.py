"""What a user may choose, and the checks that need nothing but the values themselves."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from prefetchshard.base.errors import ConfigError

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
        _at_least("PerDevice(rows)", self.rows, 1)
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
            raise ConfigError(f"Pad(mask_key={self.mask_key!r}): a non-empty string")
        if not isinstance(self.value, (numbers.Real, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            raise ConfigError(f"Pad(value={self.value!r}): a number, or True or False")


Remainder: TypeAlias = Literal["drop", "error", "pad"] | Pad


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
    workers: int | Literal["auto"]
    reuses_buffers: bool
    depth: int
    narrow: Narrow
    device_memory: int | None
    host_memory: int | None
    snapshot_every: int | None = 1

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, PerDevice):
            _at_least("batch_size", self.batch_size, 1, optional=True)
        if not isinstance(self.remainder, Pad):
            _one_of("remainder", self.remainder, ("drop", "error", "pad"), " or ps.Pad(...)")
        _one_of("narrow", self.narrow, ("check", "error", "allow"))
        _at_least("depth", self.depth, 1)
        _at_least("seed", self.seed, 0)
        _at_least("epochs", self.epochs, 1, "; None for ever", optional=True)
        _at_least("microbatches", self.microbatches, 1, optional=True)
        _at_least("snapshot_every", self.snapshot_every, 1, "; None: never", optional=True)
        if self.workers != "auto":
            _at_least("workers", self.workers, 1, "; 'auto' to choose")
        _booleans(shuffle=self.shuffle, reuses_buffers=self.reuses_buffers)
        _functions(collate=self.collate, transform=self.transform, device_transform=self.device_transform)
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
    def policy(self) -> str | Pad:
        """The remainder policy with "pad" spelt out."""
        return self.pad or self.remainder


def _at_least(name: str, value: object, least: int, more: str = "", *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ConfigError(f"{name}={value!r}: an integer, at least {least}{more}")


def _plain_integers(struct: msgspec.Struct) -> None:
    """NumPy's integers as Python's: they overflow, and no state can hold them."""
    for name in struct.__struct_fields__:
        value: Any = getattr(struct, name)
        if issubclass(type(value), np.integer):
            msgspec.structs.force_setattr(struct, name, int(value))


def _booleans(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: True or False")


def _functions(**values: object) -> None:
    for name, value in values.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name}={value!r}: a function")


def _one_of(name: str, value: object, allowed: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}{more}")
