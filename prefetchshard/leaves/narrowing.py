"""Lossless writes into memory of another dtype: 64-bit values into 32 bits, and the padding value into the dtype of a leaf."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prefetchshard.base.config import Narrow
from prefetchshard.base.errors import BatchError, NarrowingError
from prefetchshard.base.memory import AnyArray
from prefetchshard.streaming.copies import BY_NUMPY, Copies

_NARROWED = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def canonical(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any]:
    """The dtype that JAX uses for `dtype`: native byte order, and 32 bits instead of 64 while x64 is off."""
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    return dtype if x64 else _NARROWED.get(dtype, dtype)


def narrows(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a conversion from `source` to `target` can lose values."""
    return source.itemsize > target.itemsize


def refuse_narrowing(path: str, source: np.dtype[Any], target: np.dtype[Any]) -> NarrowingError:
    """The error that `narrow="error"` raises."""
    return NarrowingError(
        f"leaf {path or '(the batch itself)'}: {source} would become {target} because x64 is off and narrow='error'; "
        f"cast it in the source or `transform`, run under `jax.enable_x64(True)`, or pass narrow='check'"
    )


def store(view: AnyArray, value: AnyArray, *, path: str, policy: Narrow, row: int | None = 0, copies: Copies = BY_NUMPY) -> None:
    """Copy `value` into `view`, which has the same shape and the canonical dtype.

    Args:
        view: destination, `(rows, *example)`, or any shape if `row` is None.
        value: of the same shape, in the source's dtype.
        path: path of the leaf, for error messages.
        policy: what to do with 64-bit values that do not fit into 32 bits; see `Loader(narrow=)`.
        row: the row of the batch at which `view` begins, for error messages; None for a leaf without rows.
        copies: copies what needs no conversion.

    Raises:
        NarrowingError: under "check", if a value does not fit; the message names leaf, row and value.
    """
    if value.dtype == view.dtype:
        copies.copy(view, value)
    elif not narrows(value.dtype, view.dtype):
        np.copyto(view, value, casting="same_kind")
    elif policy == "allow":
        with np.errstate(all="ignore"):
            np.copyto(view, value, casting="unsafe")
    elif value.dtype.kind in "iu":
        _store_integers(view, value, path, row)
    else:
        _store_floats(view, value, path, row)


def _store_integers(view: AnyArray, value: AnyArray, path: str, row: int | None) -> None:
    bounds = np.iinfo(view.dtype)
    if value.size and (value.max() > bounds.max or (value.dtype.kind == "i" and value.min() < bounds.min)):
        raise _lost(view, value, (value > bounds.max) | (value < bounds.min), path, row)
    np.copyto(view, value, casting="unsafe")


def _store_floats(view: AnyArray, value: AnyArray, path: str, row: int | None) -> None:
    try:
        with np.errstate(over="raise", invalid="ignore", under="ignore"):  # the cast itself detects overflow
            np.copyto(view, value, casting="unsafe")
    except FloatingPointError:
        raise _lost(view, value, _overflows(value, view.dtype), path, row) from None


def _overflows(value: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    if value.dtype.kind == "c":
        part = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
        return _overflows(np.real(value), part) | _overflows(np.imag(value), part)
    with np.errstate(all="ignore"):
        return np.isinf(value.astype(dtype)) & ~np.isinf(value)


def _lost(view: AnyArray, value: AnyArray, wrong: AnyArray, path: str, row: int | None) -> NarrowingError:
    index = [int(i[0]) for i in np.nonzero(np.atleast_1d(wrong))]
    bad = np.atleast_1d(value)[tuple(index)]
    where = "" if value.ndim else "a scalar: "
    at = row + index.pop(0) if value.ndim and row is not None else None
    if at is not None:
        where = f"row {at} of the batch{f', index {index}' if index else ''}: "
    elif value.ndim:
        where = f"index {index}: "
    error = NarrowingError(
        f"leaf {path or '(the batch itself)'}: {where}the {value.dtype} value {bad} does not fit {view.dtype}, to which it would be "
        f"converted because x64 is off; cast or split it in `transform`, run under `jax.enable_x64(True)`, or pass narrow='allow'"
    )
    error.row = at
    return error


def pad_value(path: str, value: float | bool, dtype: np.dtype[Any]) -> AnyArray:
    """The padding value in the dtype of a leaf, as an array of shape `()`.

    Raises:
        BatchError: the dtype cannot hold it. Integers must stay exact; floats may round, but not overflow.
    """
    try:
        with np.errstate(all="ignore"):
            padding = np.full((), value, dtype)
    except (OverflowError, ValueError, TypeError):
        padding = None
    if padding is None or not _survived(value, padding.item()):
        raise BatchError(
            f"leaf {path or '(the batch itself)'}: ps.Pad(value={value!r}) does not fit dtype {dtype}; choose a value that every leaf can "
            f"hold (0 always fits), or cast the leaf in `transform`"
        )
    return padding


def _survived(value: float, got: Any) -> bool:
    if isinstance(got, (bool, int)) or not math.isfinite(value):
        return got == value or (got != got and value != value)
    return bool(np.isfinite(got))
