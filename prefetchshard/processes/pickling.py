"""What the worker processes are sent once: the source and the functions, pickled, with large arrays beside them in shared memory."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from prefetchshard.base.errors import ConfigError, SourceError
from prefetchshard.base.memory import AnyArray
from prefetchshard.processes.child import cloudpickle_if_there
from prefetchshard.processes.memory import written

LEAST_SHARED_BYTES = 1024
"""Smaller arrays are copied for each process with the rest."""


class Packed:
    """What each worker process is sent when it starts, in shared memory that all of them map.

    Args:
        parts: by name: the source and the functions, and what the child has to know beside them.
        words: of each part that is the user's, what to call it in an error.

    Attributes:
        fd: the file of the shared memory.
        table: where in it the table of the buffers begins, and how long it is.
        data: the same of the pickle.
        needs_main: what is sent refers to the main module.

    Raises:
        ConfigError: one of them cannot be pickled; the text names it and says what to do.
    """

    def __init__(self, parts: dict[str, Any], words: dict[str, str]) -> None:
        data, buffers, self.needs_main = _dumped(parts, words)
        try:
            self.fd, self.table, self.data = written(buffers, data)
        except OSError as error:
            nbytes = len(data) + sum(buffer.nbytes for buffer in buffers)
            error.add_note(f"prefetchshard: while putting the source, {nbytes:,} bytes, into memory shared with the worker processes")
            raise

    def close(self) -> None:
        """No further process will be started."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _dumped(parts: dict[str, Any], words: dict[str, str]) -> tuple[bytes, list[Any], bool]:
    """The pickle, the large buffers beside it, and whether it refers to the main module."""
    main = sys.modules.get("__main__")
    can_import_main = getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None
    by_value = cloudpickle_if_there()
    failure: BaseException | None = None
    if can_import_main or by_value is None:
        try:
            data, buffers = _pickle(_plain_pickler(), parts)
        except Exception as error:  # noqa: BLE001 - whatever the pickling of users' objects raises
            failure = error
        else:
            refers = b"__main__" in data
            if refers and not can_import_main:
                raise _refused(parts, words, None, in_main=True)
            return data, buffers, refers
    if by_value is not None:
        try:
            return (*_pickle(_by_value_pickler(by_value), parts), False)
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
    raise _refused(parts, words, failure, in_main=False) from failure


def _pickle(kind: Any, value: Any) -> tuple[bytes, list[Any]]:
    buffers: list[Any] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LEAST_SHARED_BYTES:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    kind(file, protocol=5, buffer_callback=beside).dump(value)
    return file.getvalue(), buffers


def _plain_pickler() -> Any:
    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any, /) -> Any:
            return _of_file(obj)

    return Pickler


def _by_value_pickler(cloudpickle: Any) -> Any:
    base: Any = cloudpickle.Pickler

    class Pickler(base):
        def reducer_override(self, obj: Any) -> Any:
            found = _of_file(obj)
            return base.reducer_override(self, obj) if found is NotImplemented else found

    return Pickler


# -- arrays in files


def _of_file(value: Any) -> Any:
    """How an array in a memory-mapped file travels: as the place in that file; anything else as it does by itself."""
    if not isinstance(value, np.ndarray) or type(cast("Any", value)) not in (np.ndarray, np.memmap):
        return NotImplemented
    array = cast("AnyArray", value)
    root = _file_of(array)
    if root is None:
        return NotImplemented
    mode = "r" if root.mode == "r" else "r+"
    if array is root and array.flags.c_contiguous:
        return np.memmap, (root.filename, array.dtype, mode, root.offset, array.shape)
    if array is root:
        return np.memmap, (root.filename, array.dtype, mode, root.offset, array.shape, "F")
    start = array.ctypes.data - root.ctypes.data
    whole = np.memmap, (root.filename, np.dtype(np.uint8), mode, root.offset, (root.nbytes,))
    return np.ndarray, (array.shape, array.dtype, _Reduced(whole), start, array.strides)


class _Reduced:
    """Pickles as what this call makes."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _file_of(array: AnyArray) -> Any:
    """The array that was mapped, of one that is it or a view of it; None where there is no file to be mapped again."""
    at: Any = array
    while isinstance(at, np.ndarray):
        if isinstance(at, np.memmap) and not isinstance(cast("Any", at).base, np.ndarray):
            root = cast("Any", at)
            # What was changed under mode "c" is not in the file
            is_there = root.filename is not None and root.mode != "c" and os.path.isfile(root.filename)
            return root if is_there and (root.flags.c_contiguous or root.flags.f_contiguous) else None
        at = cast("Any", at).base
    return None


# -- what cannot be pickled


def _refused(parts: dict[str, Any], words: dict[str, str], failure: BaseException | None, *, in_main: bool) -> Exception:
    """The error that names the object and says what to do."""
    advice = "define it at the top of a module, and hand its data over as attributes or with functools.partial"
    if cloudpickle_if_there() is None:
        advice += ", or install cloudpickle, which pickles lambdas and what is defined in functions and notebooks"
    if in_main:
        names = " and ".join(word for name, word in words.items() if b"__main__" in _attempt(parts[name]))
        return ConfigError(
            f"workers=ps.Processes(...): {names} is defined in a program that has no file (a notebook, a prompt), which worker processes cannot "
            f"import; {advice}"
        )
    for name, word in words.items():
        error = _trouble(parts[name])
        if error is not None:
            where = _find(parts[name], word)
            return ConfigError(
                f"workers=ps.Processes(...) sends {word} to other processes, and {where} cannot be pickled: {type(error).__name__}: {error}; "
                f"{advice}"
            )
    return SourceError(f"the source and the functions cannot be pickled: {failure}")


def _attempt(value: Any) -> bytes:
    try:
        return _pickle(_plain_pickler(), value)[0]
    except Exception:  # noqa: BLE001 - it is refused for that
        return b""


def _trouble(value: Any) -> BaseException | None:
    """What pickling it raises, by all means that there are."""
    error: BaseException | None = None
    by_value = cloudpickle_if_there()
    makers: list[Callable[[], Any]] = [_plain_pickler, *([] if by_value is None else [lambda: _by_value_pickler(by_value)])]
    for make in makers:
        try:
            _pickle(make(), value)
        except Exception as raised:  # noqa: BLE001 - as above
            error = raised
        else:
            return None
    return error


def _find(value: Any, path: str, depth: int = 4) -> str:
    """The path to the innermost attribute, key or item that cannot be pickled by itself."""
    if depth:
        for name, part in _parts(value):
            if _trouble(part) is not None:
                return _find(part, path + name, depth - 1)
    kind = cast("Any", type(value))
    return f"{path} (a {kind.__module__}.{kind.__qualname__})"


def _parts(value: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    if isinstance(value, dict):
        found += [(f"[{key!r}]", part) for key, part in cast("dict[Any, Any]", value).items()]
    elif isinstance(value, (list, tuple)):
        found += [(f"[{i}]", part) for i, part in enumerate(cast("list[Any]", value)[:1000])]
    return found
