"""How large values are copied into staging memory: by NumPy, or past the cache where that is faster on this machine."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import numpy as np

from prefetchshard.base.memory import AnyArray
from prefetchshard.streaming.machine_code import CopyRows, NoMachineCode, address_of, make_copy_rows

_log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 18
"""Less than this is copied by NumPy: a call of the machine code takes 3 microseconds more, and what is small stays in the cache."""

LEAST_ROW_BYTES = 1 << 12
"""Of the rows that are gathered: a row has up to two lines that are not written as a whole."""

ROW_LOOP_BYTES = 1 << 14
"""Rows of at least this size are copied one by one where they are not contiguous: fancy indexing makes a temporary copy."""

MEASURED_BYTES = 8 << 20
LEAST_GAIN = 1.05
ROUNDS = 5

_FIRST = np.zeros(1, np.int64)
_FIRST_ADDRESS = address_of(_FIRST)


class Copies:
    """Copies of values that need no conversion.

    Args:
        copy_rows: what copies past the cache; None: NumPy copies everything.
        least_bytes: less than this NumPy copies.

    Attributes:
        copy_rows: as above. May be set at any time.
        least_bytes: as above.

    Thread safety: any thread may call any method.
    """

    __slots__ = ("copy_rows", "least_bytes")

    def __init__(self, copy_rows: CopyRows | None = None, *, least_bytes: int = LEAST_BYTES) -> None:
        self.copy_rows = copy_rows
        self.least_bytes = least_bytes

    def copy(self, view: AnyArray, value: AnyArray) -> None:
        """`view[...] = value`, of one dtype."""
        copy_rows = self.copy_rows
        if copy_rows is None or value.nbytes < self.least_bytes or not _are_bytes(view, value) or not value.flags.c_contiguous:
            np.copyto(view, value)
        else:
            copy_rows(address_of(view), address_of(value), _FIRST_ADDRESS, 1, value.nbytes, 0)

    def take(self, view: AnyArray, source: AnyArray, rows: AnyArray) -> None:
        """`view[i] = source[rows[i]]`, of one dtype. No row number is negative or out of range.

        `np.take(..., out=)` first copies the whole source if it is not contiguous, and buffers its output unless `mode="clip"`.
        """
        copy_rows = self.copy_rows
        if copy_rows is not None and view.nbytes >= self.least_bytes and _rows_are_bytes(view, source):
            numbers = np.ascontiguousarray(rows, np.int64)
            row_bytes = view.nbytes // len(view)
            copy_rows(address_of(view), address_of(source), address_of(numbers), len(numbers), row_bytes, source.strides[0])
        elif source.flags.c_contiguous and source.flags.aligned:
            np.take(source, rows, axis=0, out=view, mode="clip")
        elif view[:1].nbytes >= ROW_LOOP_BYTES:
            for i, row in enumerate(rows.tolist()):
                view[i] = source[row]
        else:
            view[...] = source[rows]


def _are_bytes(view: AnyArray, value: AnyArray) -> bool:
    """Whether both are arrays of one shape and plain dtype, and the bytes of the first lie in one piece."""
    return view.shape == value.shape and view.dtype == value.dtype and view.flags.c_contiguous and not view.dtype.hasobject


def _rows_are_bytes(view: AnyArray, source: AnyArray) -> bool:
    row = source[0]
    return row.nbytes >= LEAST_ROW_BYTES and row.flags.c_contiguous and _are_bytes(view[0], row) and view.flags.c_contiguous


BY_NUMPY = Copies()


class Finding(NamedTuple):
    """What was found out about copies past the cache.

    Attributes:
        copy_rows: what makes them, whether it is faster or not; None: there is nothing on this machine.
        is_faster: whether it is, and so is used.
        reason: why, in words.
    """

    copy_rows: CopyRows | None
    is_faster: bool
    reason: str


class _Measured:
    """What was found out in this process, once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards all below
        self.made: CopyRows | str | None = None  # or why there is nothing
        self.findings: dict[bool, Finding] = {}  # by whether the memory is read by this processor afterwards


_measured = _Measured()


def is_decided(*, are_read: bool) -> bool:
    """Whether `streaming_if_faster` has its answer already."""
    return are_read in _measured.findings


def streaming_if_faster(*, are_read: bool) -> CopyRows | None:
    """What copies past the cache, if that is faster on this machine.

    Args:
        are_read: as for `find_streaming`.
    """
    found = find_streaming(are_read=are_read)
    return found.copy_rows if found.is_faster else None


def find_streaming(*, are_read: bool) -> Finding:
    """Whether copies past the cache are faster on this machine; found out once in a process, which takes some 60 ms.

    Args:
        are_read: whether this processor reads what was copied, as the CPU backend does. Other devices read it from memory.
    """
    with _measured.lock:
        if _measured.made is None:
            _measured.made = _make_or_say_why_not()
        made = _measured.made
        if are_read not in _measured.findings:
            found = Finding(None, False, made) if isinstance(made, str) else _compare(made, are_read=are_read)
            _measured.findings[are_read] = found
            _log.info("streaming copies: %s", found.reason)
        return _measured.findings[are_read]


def _make_or_say_why_not() -> CopyRows | str:
    try:
        return make_copy_rows()
    except NoMachineCode as reason:
        return str(reason)
    except Exception as error:  # noqa: BLE001 - LLVM may raise anything
        return f"LLVM says {error}"


def _compare(copy_rows: CopyRows, *, are_read: bool) -> Finding:
    """Copy by both from memory to memory of which nothing is in the cache, as it is with large sources and with the slots of a ring."""
    other, source, target = np.ones((3, MEASURED_BYTES), np.uint8)
    streaming, caching = Copies(copy_rows), Copies()
    best = {True: 1e9, False: 1e9}
    for _ in range(ROUNDS):
        for streams, copies in ((True, streaming), (False, caching)):
            for memory in (source, target):
                streaming.copy(memory, other)  # takes it out of the cache
            began = time.perf_counter()
            copies.copy(target, source)
            if are_read:
                int(target.view(np.uint64).sum())
            best[streams] = min(best[streams], time.perf_counter() - began)
    faster = best[False] > LEAST_GAIN * best[True]
    reason = (
        f"{MEASURED_BYTES >> 20} MiB are copied{' and read' if are_read else ''} in {1e3 * best[True]:.2f} ms past the cache, "
        f"in {1e3 * best[False]:.2f} ms through it: {'used' if faster else 'not used'}"
    )
    return Finding(copy_rows, faster, reason)
