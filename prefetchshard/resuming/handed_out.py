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
    done = state.rows if have.batch_size is not None else state.batches
    if have.kind == "random access" and have.length is not None and done > have.length:
        raise StateError(f"the state was saved after {done} of {have.length} items of an epoch: no loader can have made it")
    wrong = _contradiction(state, state.fingerprint.length if have.length is None else have.length)
    if wrong is not None:
        raise StateError(f"the state contradicts itself, so no loader can have made it: {wrong}")
    return StartPoint(**{name: getattr(state, name) for name in StartPoint.__struct_fields__})


def _contradiction(state: LoaderState, length: int | None) -> str | None:
    """What in a state cannot be together, in words; None: nothing. `length`: of the source.

    `rebatch` leaves batches of several sizes behind it, so rows are no multiple of the batch size.
    """
    run, run_epoch, epoch, step = state.run, state.run_epoch, state.epoch, state.step
    batches, rows, last_rows = state.batches, state.rows, state.last_rows
    fingerprint = state.fingerprint
    by_number, has_size = fingerprint.kind == "random access", fingerprint.batch_size is not None
    before = step - batches  # batches of the epochs before this one
    if run_epoch > epoch:
        return f"run_epoch={run_epoch} and epoch={epoch}: a run is in the epoch with which it began, or in a later one"
    if run == 0 and run_epoch:
        return f"run=0 and run_epoch={run_epoch}: the first run begins with epoch 0"
    if before < 0 or (epoch == 0 and before):
        return f"step={step}, batches={batches} and epoch={epoch}: step counts the batches of this epoch, and those of the epochs before it"
    if by_number and length is not None:
        most = epoch * length
        if has_size:
            least = epoch if length else 0  # of any size, as `rebatch` may have changed it
        else:
            least = epoch * (length - (fingerprint.remainder == "drop")) if length else 0
        if not least <= before <= most:
            return (
                f"step={step}, batches={batches} and epoch={epoch}: {epoch} epochs of a source of length {length} have {least} to {most} "
                f"batches, not {before}"
            )
    if batches == 0 and (rows or last_rows):
        return f"batches=0, rows={rows} and last_rows={last_rows}: without a batch there are no rows"
    least_rows = max(last_rows, 1) + batches - 1 if has_size else last_rows
    is_left_out = by_number and last_rows == 0  # which decides nothing there
    if batches and (rows < least_rows or (not is_left_out and ((has_size and not last_rows) or (batches == 1 and rows != last_rows)))):
        return (
            f"batches={batches}, rows={rows} and last_rows={last_rows}: the last batch has last_rows of the rows, the others have the rest"
        )
    return _contradiction_of_way(state, by_number) or _contradiction_of_first(state)


def _contradiction_of_way(state: LoaderState, by_number: bool) -> str | None:
    """As `_contradiction`, for how the place is found again."""
    way, since = state.resumes_by, state.since_snapshot
    if (way == "index") != by_number:
        return (
            f"resumes_by={way!r} and kind={state.fingerprint.kind!r}: rows are found by index where there is random access, and only there"
        )
    if (way == "snapshot") != (state.snapshot is not None):
        has = "no snapshot" if state.snapshot is None else "a snapshot"
        return f"resumes_by={way!r} and {has}"
    if way != "replay" and state.sample is not None:
        return f"resumes_by={way!r} and a sample, which is for a replay"
    if way == "index" and since:
        return f"resumes_by='index' and since_snapshot={since}"
    place, name = (state.batches, "batches") if state.fingerprint.batch_size is None else (state.rows, "rows")
    if way == "snapshot" and (since > place or not state.batches):
        return f"since_snapshot={since} and {name}={place}: a snapshot is taken after a batch of its epoch"
    return None


def _contradiction_of_first(state: LoaderState) -> str | None:
    """As `_contradiction`, for the rows of the first batch of the run."""
    first, batches, rows = state.batch_rows, state.batches, state.rows
    pads = state.fingerprint.remainder == "pad"
    if first is None:
        return None
    if not batches or (state.fingerprint.batch_size is not None and not pads):
        return f"batch_rows={first}, batches={batches} and batch_size={state.fingerprint.batch_size}: it is of batches that the source made"
    began_here = state.run == 0 and state.epoch == 0 and state.fingerprint.batch_size is None and not pads
    if began_here and (rows < first or (batches == 1 and rows != first)):
        return f"batch_rows={first}, batches={batches} and rows={rows}: the first batch of the run is one of these"
    return None


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
        remainder="pad" if isinstance(settings.policy, Pad) else settings.policy,
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


def rows_left(start: StartPoint, order: EpochOrder, batch_size: int | None) -> int:
    """Rows of a source with row numbers (batches, without `batch_size`) that are left of the epoch."""
    return order.length - (start.batches if batch_size is None else start.rows)


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
