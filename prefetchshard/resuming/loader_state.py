"""Where a run stands, as a value: to save, to check against a loader, and to go on from.

On the wire a state is `PFSt`, eight bytes of BLAKE2b over the rest, and one MessagePack array that begins with the version. Reading
runs no code from the file, and whatever the bytes are, the outcome is a state or a `StateError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Self, cast

import msgspec
import numpy as np

from prefetchshard.base.errors import StateError
from prefetchshard.base.position import StartPoint

VERSION: Final = 2
"""The version of the state that this library writes; it reads version 1 too."""

_MAGIC: Final = b"PFSt"
_HEAD_BYTES: Final = len(_MAGIC) + 8
_MAX_COUNT: Final = 2**63 - 1
_MAX_DEPTH: Final = 64
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, struct.error)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What fixes the order of rows; a state goes on only under the same.

    Args:
        seed: at most 256 bits.
        shuffle: whether the rows of an epoch are permuted.
        length: rows (without `batch_size`: batches) of the source; None where that is not known, which fits every length.
        batch_size: global rows a step; None where the source makes the batches.
        remainder: "drop", "error" or "pad".
        kind: "random access" (the same rows as arrays and as a dataset have one order) or "iterator".

    Raises:
        StateError: a value is of another type or out of range.

    Thread safety: immutable.
    """

    seed: int
    shuffle: bool
    length: int | None
    batch_size: int | None
    remainder: str
    kind: str

    def __post_init__(self) -> None:
        length, batch_size, kind = self.length, self.batch_size, self.kind
        _want("seed", self.seed, type(self.seed) is int and self.seed.bit_length() <= 256, "an int of at most 256 bits")
        _want("shuffle", self.shuffle, type(self.shuffle) is bool, "a bool")
        _want("length", length, length is None or _is_count(length), "None or a count")
        _want("batch_size", batch_size, batch_size is None or (_is_count(batch_size) and batch_size > 0), "None or at least 1")
        _want("remainder", self.remainder, self.remainder in ("drop", "error", "pad"), "'drop', 'error' or 'pad'")
        _want("kind", kind, type(kind) is str and 0 < len(kind) <= 64 and kind.isprintable(), "a short printable text")


class LoaderState(StartPoint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a consumer got, counted in what it was handed, whatever was read ahead: a start point, and what fixed the order of rows.

    Example:
        loader = ps.Loader({"x": np.arange(64)}, batch_size=16)
        iterator = iter(loader)
        next(iterator)
        saved = iterator.state().encode()
        iterator.close()
        rest = ps.Loader({"x": np.arange(64)}, batch_size=16, state=ps.LoaderState.decode(saved))
        assert len(list(rest)) == 3

    Args:
        version: of the state's format.
        fingerprint: what fixed the order.
        run, run_epoch, epoch, rows, batches, step, last_rows, batch_rows: see `StartPoint`.
        resumes_by, snapshot, since_snapshot, sample: see `StartPoint`.

    Raises:
        StateError: a value is of another type or out of range.

    Thread safety: immutable.
    """

    version: int = VERSION
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        _check_version(self.version)
        for name in ("run", "run_epoch", "epoch", "rows", "batches", "step", "last_rows", "since_snapshot"):
            value: object = getattr(self, name)
            _want(name, value, _is_count(value), "a count from 0 to 2**63 - 1")
        snapshot, sample, batch_rows = self.snapshot, self.sample, self.batch_rows
        _want("batch_rows", batch_rows, batch_rows is None or _is_count(batch_rows), "None or a count")
        _want("resumes_by", self.resumes_by, self.resumes_by in ("index", "snapshot", "replay"), "'index', 'snapshot' or 'replay'")
        _want("snapshot", snapshot, snapshot is None or type(snapshot) is bytes, "None or bytes from pack_snapshot")
        _want("sample", sample, sample is None or (type(sample) is bytes and len(sample) <= 64), "None or at most 64 bytes")
        _want("fingerprint", self.fingerprint, type(self.fingerprint) is Fingerprint, "a Fingerprint")

    def encode(self) -> bytes:
        """Returns the state as bytes, the same for equal states."""
        start = [getattr(self, name) for name in StartPoint.__struct_fields__]
        return _seal(_pack([VERSION, start, list(msgspec.structs.astuple(self.fingerprint))]))

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Self:
        """Reads what `encode` wrote.

        Raises:
            StateError: the bytes are damaged, foreign, or of a newer version.
        """
        if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise StateError(f"a state is read from bytes, not from {_type_name(data)}")
        values = _reading(_unpack, _unseal(_reading(bytes, data)))
        if type(values) is not list or not values:
            raise StateError("the state is damaged: it is no list of values")
        values = cast("list[Any]", values)
        version = values[0]
        _check_version(version)
        if version == 1:  # one flat list
            start, rest = values[1:-1], values[-1:]
        else:
            start, *rest = values[1:] or [None]
        if len(rest) != 1:
            raise StateError(f"the state is damaged: it does not have the parts of version {version}")
        fields = {**_named(StartPoint, start), "version": version, "fingerprint": _named(Fingerprint, rest[0])}
        return cls._from_fields(fields, builtin_types=(bytes,))

    def to_json(self) -> str:
        """Returns the state as one line of JSON, nothing left out; bytes are base64."""
        return msgspec.json.format(msgspec.json.encode(self), indent=0).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what `to_json` wrote; raises StateError as `decode` does, and for a field too many or too few."""
        fields = _reading(msgspec.json.decode, text)
        if type(fields) is not dict:
            raise StateError("a state in JSON is an object")
        fields = cast("dict[str, Any]", fields)
        _check_version(fields.get("version", VERSION))
        # Without this a misspelt or lost field would take its default, and the run would quietly start over.
        if missing := set(cls.__struct_fields__) - set(fields):
            raise StateError(f"the state lacks {', '.join(sorted(missing))}")
        return cls._from_fields(fields)

    @classmethod
    def _from_fields(cls, fields: dict[str, Any], *, builtin_types: tuple[type, ...] = ()) -> Self:
        if fields.get("version") == 1:  # its `sample` was of a batch as it was placed, and is now of items as they are pulled
            fields = {**fields, "version": VERSION, "sample": None}
        return _reading(lambda: msgspec.convert(fields, cls, builtin_types=builtin_types))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file, so that a crash at any moment leaves the old state or the new one, whole.

        Raises:
            OSError: the file cannot be written; the old one is then untouched.
        """
        # Through a link the file behind it is replaced, not the link.
        target = os.path.realpath(path)
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name[:64]}.{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(self.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _sync_folder(folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            StateError: the file is damaged, foreign, or of a newer version; the text names it.
            OSError: the file is not there, or cannot be read.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            return cls.decode(data)
        except StateError as error:
            raise StateError(f"{os.fspath(path)}: {error}") from error

    def rebatch(self, batch_size: int) -> Self:
        """Returns the state to go on from with another batch size, at the very next row.

        `rows`, `batches` and `step` still count what was handed out; what speaks of batches of the old size (`sample`, `batch_rows`)
        is dropped.

        Raises:
            StateError: the place is known only in batches, or only by the source; or `batch_size` is none.
        """
        if self.fingerprint.batch_size is None:
            raise StateError("rebatch: the source makes the batches, so their size is not the loader's to change")
        if self.resumes_by == "snapshot":
            raise StateError("rebatch: the place is in the source's own state, which was taken between batches of the old size")
        _want("batch_size", batch_size, _is_count(batch_size) and batch_size > 0, "at least 1")
        fingerprint = msgspec.structs.replace(self.fingerprint, batch_size=batch_size)
        return msgspec.structs.replace(self, fingerprint=fingerprint, sample=None, batch_rows=None)

    def unchecked(self) -> Self:
        """Returns the state without its `sample`: a replay then takes any source for the one that was read before.

        For sources that differ from time to time and are meant to, such as one with augmentation that is not seeded.
        """
        return msgspec.structs.replace(self, sample=None)

    def check(self, have: Fingerprint) -> None:
        """Compares with a loader.

        Raises:
            StateError: the loader would give other batches; the text names each field that differs, with both values.
        """
        faults = [self._fault(name, have) for name in Fingerprint.__struct_fields__ if self._differs(name, have)]
        if faults:
            raise StateError(f"the state does not fit this loader: {'; '.join(faults)}")

    def _differs(self, name: str, have: Fingerprint) -> bool:
        ours, theirs = getattr(self.fingerprint, name), getattr(have, name)
        return ours != theirs and not (name == "length" and None in (ours, theirs))

    def _fault(self, name: str, have: Fingerprint) -> str:
        text = f"{name}: the state has {getattr(self.fingerprint, name)!r}, this loader {getattr(have, name)!r}"
        if name != "batch_size" or None in (have.batch_size, self.fingerprint.batch_size) or self.resumes_by == "snapshot":
            return text
        return f"{text}; state.rebatch({have.batch_size}) goes on with another batch size"


def _want(name: str, value: object, holds: bool, what: str) -> None:
    if not holds:
        raise StateError(f"{name}={_shown(value)} ({_type_name(value)}): {what} is needed")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _check_version(version: object) -> None:
    if type(version) is int and version > VERSION:
        raise StateError(f"written by a newer prefetchshard: version {_shown(version)}, this one reads up to {VERSION}")
    _want("version", version, type(version) is int and version > 0, f"1 to {VERSION}")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits has no repr
        text = "<a very large value>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _named(kind: type[msgspec.Struct], values: object) -> dict[str, Any]:
    names = kind.__struct_fields__
    if type(values) is not list or len(cast("list[Any]", values)) != len(names):
        raise StateError(f"the state is damaged: its {kind.__name__} does not have {len(names)} values")
    return dict(zip(names, cast("list[Any]", values), strict=True))


def _reading(read: Callable[..., Any], *arguments: object) -> Any:
    try:
        return read(*arguments)
    except StateError:
        raise
    except _UNREADABLE as error:
        raise StateError(f"the state cannot be read: {error}") from error


def _seal(payload: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(payload, digest_size=_HEAD_BYTES - len(_MAGIC)).digest() + payload


def _unseal(data: bytes) -> bytes:
    if data[: len(_MAGIC)] != _MAGIC:
        raise StateError(f"not a prefetchshard state: it begins with {data[: len(_MAGIC)]!r}" if data else "the state is empty")
    payload = data[_HEAD_BYTES:]
    if _seal(payload) != data:
        raise StateError("the state is damaged: its checksum does not match")
    return payload


def _sync_folder(folder: str) -> None:
    # Not every platform and file system can; the file itself is whole either way.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# What MessagePack lacks is written as an extension: one with the data inside for a leaf; for a container, an empty one as the first
# item of an array, which no list of the source's can begin with. Codes are part of the format: add, never renumber.
_INTEGER, _COMPLEX, _BYTEARRAY, _TEXT = 1, 2, 3, 4
_TUPLE, _SET, _FROZENSET, _DICT, _ORDERED, _ARRAY, _SCALAR, _TENSOR = 16, 17, 18, 19, 20, 21, 22, 23
_CODES: Final[dict[type, int]] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET, dict: _DICT, OrderedDict: _ORDERED}
_DTYPE: Final = re.compile(r"[<>|][biufcmMSUV][0-9]+(\[\w+\])?|(b?complex|bfloat|float|u?int)[0-9]\w*", re.ASCII)
_KEPT: Final = "numbers, text, bytes, lists, tuples, sets, dicts and NumPy arrays of them can be kept"


def _head(code: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, b"")


class _Refused(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []


def pack_snapshot(value: Any) -> bytes:
    """Encodes a source's own state as it is now, so that the source may go on changing it.

    None, bool, int of any size, float, complex, text, bytes, bytearray, list, tuple, set, frozenset, dict (any keys), OrderedDict,
    NumPy scalars and arrays, and tensors of torch (on the CPU) come back equal and of the same type. Which parts are the same object does not come back.

    Raises:
        StateError: something in it cannot be kept (objects, subclasses, more than 64 levels); the text says where it sits.
    """
    try:
        return _pack(value)
    except _Refused as refused:
        place = "".join(refused.path)
        raise StateError(f"the source's own state{place if len(place) <= 200 else place[:197] + '...'}: {refused}") from None
    except (OverflowError, ValueError, RecursionError) as error:
        raise StateError(f"the source's own state cannot be kept: {error}") from error


def unpack_snapshot(data: bytes) -> Any:
    """Returns what `pack_snapshot` was given, new at each call; raises StateError for bytes that it did not write."""
    return _reading(_unpack, data)


def _pack(value: object) -> bytes:
    return msgspec.msgpack.encode(_lower(value, 0))


def _unpack(data: bytes) -> Any:
    return _lift(msgspec.msgpack.decode(data), 0)


def _lower(value: object, depth: int) -> Any:
    lower = _LOWER.get(type(value))
    if lower is not None:
        return lower(value, depth)
    if isinstance(value, np.generic):
        return _lower_scalar(cast("np.generic[Any]", value))
    if type(value).__module__ == "torch" and type(value).__qualname__ == "Tensor":
        return _lower_tensor(value, depth)
    raise _Refused(f"{_type_name(value)} cannot be kept in a state; {_KEPT}")


def _as_is(value: Any, _: int) -> Any:
    return value


def _lower_integer(value: int, _: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _lower_text(value: str, _: int) -> Any:
    # File names that are not UTF-8 hold lone surrogates, which MessagePack refuses.
    data = value.encode("utf-8", "surrogatepass")
    return value if value.isascii() or data.decode("utf-8", "replace") == value else msgspec.msgpack.Ext(_TEXT, data)


def _lower_all(items: Iterable[Any], depth: int, place: Callable[[int], str]) -> list[Any]:
    if depth >= _MAX_DEPTH:
        raise _Refused(f"more than {_MAX_DEPTH} levels deep; does it contain itself?")
    lowered: list[Any] = []
    try:
        for item in items:
            lowered.append(_lower(item, depth + 1))  # noqa: PERF401 - the length names the item that failed
    except _Refused as refused:
        refused.path.insert(0, place(len(lowered)))
        raise
    return lowered


def _lower_list(value: list[Any], depth: int) -> list[Any]:
    return _lower_all(value, depth, "[{}]".format)


def _lower_tuple(value: tuple[Any, ...], depth: int) -> list[Any]:
    return [_head(_TUPLE), *_lower_all(value, depth, "[{}]".format)]


def _lower_set(value: set[Any] | frozenset[Any], depth: int) -> list[Any]:
    # Sorted, so that equal states are equal bytes.
    return [_head(_CODES[type(value)]), *sorted(_lower_all(value, depth, " (an element)".format), key=msgspec.msgpack.encode)]


def _lower_dict(value: dict[Any, Any], depth: int) -> Any:
    keys = _lower_all(value, depth, " (a key)".format)
    values = _lower_all(value.values(), depth, lambda index: f"[{_shown(list(value)[index])}]")
    if type(value) is dict and all(type(key) is str for key in keys):
        return dict(zip(keys, values, strict=True))
    return [_head(_CODES[type(value)]), *(item for pair in zip(keys, values, strict=True) for item in pair)]


def _lower_array(value: np.ndarray[Any, Any], _: int) -> list[Any]:
    return [_head(_ARRAY), _dtype_name(value.dtype), list(value.shape), value.tobytes()]


def _lower_scalar(value: np.generic[Any]) -> list[Any]:
    if type(value) is not value.dtype.type:
        raise _Refused(f"{_type_name(value)} cannot be kept in a state; {_KEPT}")
    if isinstance(value, np.str_):  # as an array, and by str(), it would lose zeros at its end; so would np.bytes_
        return [_head(_SCALAR), "U", _lower_text(str.__str__(value), 0)]
    if isinstance(value, np.bytes_):
        return [_head(_SCALAR), "S", bytes(value)]
    return [_head(_SCALAR), _dtype_name(value.dtype), value.tobytes()]


def _lower_tensor(value: Any, depth: int) -> list[Any]:
    try:
        array = value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:  # such as of bfloat16, or sparse
        raise _Refused(f"this torch.Tensor cannot be kept in a state ({error}); {_KEPT}") from error
    return [_head(_TENSOR), _lower_array(array, depth)]


def _dtype_name(dtype: np.dtype[Any]) -> str:
    registered = dtype.isbuiltin == 2
    name = dtype.name if registered else dtype.str
    if _DTYPE.fullmatch(name) and dtype.itemsize and np.dtype(name) == dtype:
        return name
    raise _Refused(f"a NumPy array of dtype {dtype} cannot be kept in a state; {_KEPT}")


_LOWER: Final[dict[type, Callable[[Any, int], Any]]] = {
    **dict.fromkeys((type(None), bool, float, bytes), _as_is),
    int: _lower_integer,
    complex: lambda value, _: msgspec.msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag)),
    bytearray: lambda value, _: msgspec.msgpack.Ext(_BYTEARRAY, bytes(value)),
    str: _lower_text,
    list: _lower_list,
    tuple: _lower_tuple,
    **dict.fromkeys((set, frozenset), _lower_set),
    **dict.fromkeys((dict, OrderedDict), _lower_dict),
    np.ndarray: _lower_array,
}


def _lift(value: object, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels deep")
    if type(value) is list:
        return _lift_list(cast("list[Any]", value), depth + 1)
    if type(value) is dict:
        return {_text(key): _lift(item, depth + 1) for key, item in cast("dict[Any, Any]", value).items()}
    if type(value) is msgspec.msgpack.Ext and value.code in _LEAVES:
        return _LEAVES[value.code](bytes(value.data))
    if _LOWER.get(type(value)) in (_as_is, _lower_integer, _lower_text):
        return value
    raise ValueError(f"an unexpected {_shown(value)}")


def _lift_list(value: list[Any], depth: int) -> Any:
    head = value[0] if value else None
    code = head.code if type(head) is msgspec.msgpack.Ext else None
    if code == _ARRAY:
        return _lift_array(*value[1:])
    if code == _SCALAR:
        return _lift_scalar(*value[1:])
    build = _CONTAINERS.get(code)
    if build is None:
        return [_lift(item, depth) for item in value]
    return build([_lift(item, depth) for item in value[1:]])


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{_type_name(value)} in place of text")
    return value


def _lift_array(name: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    # Only names that `_dtype_name` gives: NumPy reads much more into a text, some of it deprecated, some of it objects.
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"dtype {_shown(name)}")
    dtype = np.dtype(name)
    fits = all(map(_is_count, shape)) and math.prod(shape) * dtype.itemsize == len(data)
    if not dtype.itemsize or not fits:
        raise ValueError(f"an array of {name} whose shape and bytes do not match")
    return np.ndarray(shape, dtype, data).copy()


def _lift_scalar(name: str, data: Any) -> Any:
    if name == "U":
        return np.str_(_text(_lift(data, 0)))
    if name == "S" and type(data) is bytes:
        return np.bytes_(data)
    return _lift_array(name, [], data)[()]


def _lift_tensor(items: list[Any]) -> Any:
    (array,) = items
    if type(array) is not np.ndarray:
        raise ValueError(f"{_type_name(cast('object', array))} in place of the array of a tensor")
    try:
        import torch  # pyright: ignore[reportMissingImports] - whose tensor it is
    except ImportError as error:
        raise StateError("the source's own state holds a tensor, and torch is not installed here") from error
    return cast("Any", torch).from_numpy(array)


_LEAVES: Final[dict[int, Callable[[bytes], Any]]] = {
    _INTEGER: lambda data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    _BYTEARRAY: bytearray,
    _TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
}
_CONTAINERS: Final[dict[int | None, Callable[[list[Any]], Any]]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _DICT: lambda items: dict(_pairs(items)),
    _ORDERED: lambda items: OrderedDict(_pairs(items)),
    _TENSOR: _lift_tensor,
}
