"""Converts the batches that a run has delivered to a `LoaderState`, and a `LoaderState` back to the start point of a run."""

from __future__ import annotations

import hashlib

import msgspec

from prefetchshard.base.config import Pad, Settings
from prefetchshard.base.errors import ConfigError, StateError
from prefetchshard.base.position import Position, StartPoint
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.resuming.loader_state import Fingerprint, LoaderState
from prefetchshard.sources import Source
from prefetchshard.sources.iterables import Stream
from prefetchshard.sources.stateful import find_state_access, refuse_snapshot


class HandedOut:
    """Tracks how much of a run was delivered to the consumer.

    Args:
        start: where the run began.

    Attributes:
        position: position of the last batch delivered; None before the first.
        end: once the run is exhausted, the start point of the next run; else None.

    Thread safety: each attribute is one reference, set by the consumer; `state` takes no lock and may be called from any thread.
    """

    __slots__ = ("end", "position", "start")

    def __init__(self, start: StartPoint) -> None:
        self.start = start
        self.position: Position | None = None
        self.end: StartPoint | None = None

    def state(self, fingerprint: Fingerprint) -> LoaderState:
        """The state after the last batch delivered."""
        end, position = self.end, self.position  # each read once: another thread may set them
        return state_at(end or (self.start if position is None else position.after), fingerprint)


def state_at(start: StartPoint, fingerprint: Fingerprint) -> LoaderState:
    """The state of a run whose next batch begins here."""
    return LoaderState(**msgspec.structs.asdict(start), fingerprint=fingerprint)


def start_point_of(state: object, have: Fingerprint) -> StartPoint:
    """The start point of a run that resumes from a state.

    Raises:
        ConfigError: `state` is no `LoaderState`.
        StateError: it does not fit a loader with the fingerprint `have`.
    """
    if not isinstance(state, LoaderState):
        kind = type(state).__qualname__
        if isinstance(state, bytes | bytearray | memoryview):
            raise ConfigError(f"state= takes a LoaderState, not {kind}: state=ps.LoaderState.decode(...), or .load(path) from a file")
        raise ConfigError(f"state= takes a LoaderState (from state(), LoaderState.decode or LoaderState.load), not {kind}")
    state.check(have)
    return StartPoint(**{name: getattr(state, name) for name in StartPoint.__struct_fields__})


def fingerprint_of(settings: Settings, source: Source, batch_size: int | None) -> Fingerprint:
    """The fingerprint of a loader: all that determines the order of its rows."""
    if source.is_numbered is True:
        kind, length = "random access", source.length  # one kind: arrays and a list of the same rows have the same order
    else:
        kind, length = "iterator", None if source.one_shot else _length_of(source)
    return Fingerprint(
        seed=_stored_seed(settings.seed),
        shuffle=settings.shuffle,
        length=length,
        batch_size=None if batch_size is None else int(batch_size),
        remainder="pad" if isinstance(settings.remainder, Pad) else settings.remainder,
        kind=kind,
    )


def _length_of(source: Stream) -> int | None:
    try:
        return source.length
    except Exception:  # noqa: BLE001 - raised by the source's own code; the length is optional here, and `len(loader)` reports the error
        return None


def _stored_seed(seed: int) -> int:
    """The seed, or a 256-bit hash of a longer one."""
    seed = int(seed)
    if seed.bit_length() <= 256:
        return seed
    return int.from_bytes(hashlib.blake2b(seed.to_bytes(seed.bit_length() // 8 + 1, "little"), digest_size=32).digest(), "little")


def check_rows_left(start: StartPoint, order: EpochOrder, settings: Settings, batch_size: int | None) -> None:
    """Check that a source with row numbers can resume here.

    Raises:
        StateError: the place is beyond the end of the epoch.
        ConfigError: the remaining rows are no multiple of the batch size, and remainder="error".
    """
    done = start.batches if batch_size is None else start.rows
    left = order.length - done
    if left < 0:
        raise StateError(f"the state was saved after {done} of {order.length} items of an epoch: no loader can have made it")
    if settings.remainder == "error" and batch_size and left % batch_size:
        raise ConfigError(
            f"{left} rows of epoch {start.epoch} are left, no multiple of batch_size={batch_size}, and remainder='error': drop the last "
            f"batch (remainder='drop') or fill it up under a mask (remainder='pad')"
        )


def check_one_shot(start: StartPoint, source: object) -> None:
    """Check that a one-shot iterator can resume here.

    Raises:
        StateError: the state is in a later epoch, or holds a source's own state that this iterator cannot restore.
    """
    if start.epoch != start.run_epoch:
        raise StateError(
            f"the state was saved in epoch {start.epoch} of a run that began with epoch {start.run_epoch}, and a one-shot iterator has one "
            f"epoch: pass a function that makes a new iterator each epoch"
        )
    if start.snapshot is not None and find_state_access(source) is None:
        raise refuse_snapshot(source)


def next_run(start: StartPoint, last: Position | None, epochs: int | None) -> StartPoint:
    """The start point of the run that follows an exhausted one.

    Args:
        start: where the exhausted run began.
        last: position of its last batch; None if it had no batch.
        epochs: epochs per run.
    """
    epoch = start.run_epoch + (epochs or 0)
    if start.epoch >= epoch:  # resumed with a smaller `epochs`, after more than that were read
        return msgspec.structs.replace(start, run=start.run + 1, run_epoch=start.epoch)
    way = "index" if start.resumes_by == "index" else "replay"
    return StartPoint(run=start.run + 1, run_epoch=epoch, epoch=epoch, step=start.step if last is None else last.step + 1, resumes_by=way)
