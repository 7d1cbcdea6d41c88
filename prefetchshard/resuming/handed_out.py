"""Where a run stands, as its consumer sees it: from the batches handed out to a `LoaderState`, and from that back to a beginning."""

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
    """What of a run was handed out.

    Args:
        start: where the run began.

    Attributes:
        position: of the last batch handed out; None before the first.
        end: where the run after this one begins, once this one ended by itself.

    Thread safety: each attribute is one reference, set by the consumer; `state` takes no lock and may be called from any thread.
    """

    __slots__ = ("end", "position", "start")

    def __init__(self, start: StartPoint) -> None:
        self.start = start
        self.position: Position | None = None
        self.end: StartPoint | None = None

    def state(self, fingerprint: Fingerprint) -> LoaderState:
        """The state after the last batch handed out."""
        end, position = self.end, self.position  # each read once: another thread may set them
        return state_at(end or (self.start if position is None else position.after), fingerprint)


def state_at(start: StartPoint, fingerprint: Fingerprint) -> LoaderState:
    """The state of a run that has not handed out anything."""
    return LoaderState(**msgspec.structs.asdict(start), fingerprint=fingerprint)


def start_point_of(state: object, have: Fingerprint) -> StartPoint:
    """The beginning of a run that goes on from a state.

    Raises:
        ConfigError: it is no `LoaderState`.
        StateError: the loader would give other batches.
    """
    if not isinstance(state, LoaderState):
        kind = type(state).__qualname__
        if isinstance(state, bytes | bytearray | memoryview):
            raise ConfigError(f"state= takes a LoaderState, not {kind}: state=ps.LoaderState.decode(...), or .load(path) from a file")
        raise ConfigError(f"state= takes a LoaderState (from state(), LoaderState.decode or LoaderState.load), not {kind}")
    state.check(have)
    return StartPoint(**{name: getattr(state, name) for name in StartPoint.__struct_fields__})


def fingerprint_of(settings: Settings, source: Source, batch_size: int | None) -> Fingerprint:
    """What fixes the order of the rows that a loader gives."""
    if source.is_numbered is True:
        kind, length = "random access", source.length  # the same rows as arrays or as a list have the same order
    else:
        kind, length = "iterator", None if source.one_shot else _length_of(source)
    return Fingerprint(
        seed=_seed_as_kept(settings.seed),
        shuffle=settings.shuffle,
        length=length,
        batch_size=None if batch_size is None else int(batch_size),
        remainder="pad" if isinstance(settings.remainder, Pad) else settings.remainder,
        kind=kind,
    )


def _length_of(source: Stream) -> int | None:
    try:
        return source.length
    except Exception:  # noqa: BLE001 - the source's own code, asked for what is good to have; `len(loader)` lets it be heard
        return None


def _seed_as_kept(seed: int) -> int:
    """The seed itself, or 256 bits made from a longer one."""
    seed = int(seed)
    if seed.bit_length() <= 256:
        return seed
    return int.from_bytes(hashlib.blake2b(seed.to_bytes(seed.bit_length() // 8 + 1, "little"), digest_size=32).digest(), "little")


def check_rows_left(start: StartPoint, order: EpochOrder, settings: Settings, batch_size: int | None) -> None:
    """Whether rows by number can go on from here.

    Raises:
        StateError: the epoch has no such place.
        ConfigError: the rows that are left make no whole batches, and remainder="error".
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
    """Whether a one-shot iterator can go on from here.

    Raises:
        StateError: it has one epoch, and the state is further; or it takes no state of its own, and the state holds one.
    """
    if start.epoch != start.run_epoch:
        raise StateError(
            f"the state was saved in epoch {start.epoch} of a run that began with epoch {start.run_epoch}, and a one-shot iterator has one "
            f"epoch: pass a function that makes a new iterator each epoch"
        )
    if start.snapshot is not None and find_state_access(source) is None:
        raise refuse_snapshot(source)


def next_run(start: StartPoint, last: Position | None, epochs: int | None) -> StartPoint:
    """Where the run begins that follows one that ended by itself.

    Args:
        start: where the ended one began.
        last: of its last batch; None where it had none.
        epochs: of a run.
    """
    epoch = start.run_epoch + (epochs or 0)
    if start.epoch >= epoch:  # it was to have fewer epochs than were read of it already
        return msgspec.structs.replace(start, run=start.run + 1, run_epoch=start.epoch)
    way = "index" if start.resumes_by == "index" else "replay"
    return StartPoint(run=start.run + 1, run_epoch=epoch, epoch=epoch, step=start.step if last is None else last.step + 1, resumes_by=way)
