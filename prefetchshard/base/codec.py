"""The codec for states: Python values to MessagePack and back, with types and NumPy arrays kept.

It packs the state of a loader and a source's own state. Reading runs no code from the bytes. It sits below both packages that use it:
sources must not import from resuming.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import msgspec
import numpy as np

from prefetchshard.base.errors import StateError

MAX_COUNT: Final = 2**63 - 1
_MAX_DEPTH: Final = 64
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, struct.error)

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
        return pack_plain(value)
    except _Refused as refused:
        place = "".join(refused.path)
        raise StateError(f"the source's own state{place if len(place) <= 200 else place[:197] + '...'}: {refused}") from None
    except (OverflowError, ValueError, RecursionError) as error:
        raise StateError(f"the source's own state cannot be kept: {error}") from error


def unpack_snapshot(data: bytes) -> Any:
    """Returns what `pack_snapshot` was given, new at each call; raises StateError for bytes that it did not write."""
    return read_safely(unpack_plain, data)


def pack_plain(value: object) -> bytes:
    """`pack_snapshot` without words about the source around its errors."""
    return msgspec.msgpack.encode(_lower(value, 0))


def unpack_plain(data: bytes) -> Any:
    """What `pack_plain` was given; raises errors of many kinds for bytes that it did not write."""
    return _lift(msgspec.msgpack.decode(data), 0)


def _lower(value: object, depth: int) -> Any:
    lower = _LOWER.get(type(value))
    if lower is not None:
        return lower(value, depth)
    if isinstance(value, np.generic):
        return _lower_scalar(cast("np.generic[Any]", value))
    if type(value).__module__ == "torch" and type(value).__qualname__ == "Tensor":
        return _lower_tensor(value, depth)
    raise _Refused(f"{type_name(value)} cannot be kept in a state; {_KEPT}")


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
    values = _lower_all(value.values(), depth, lambda index: f"[{shown(list(value)[index])}]")
    if type(value) is dict and all(type(key) is str for key in keys):
        return dict(zip(keys, values, strict=True))
    return [_head(_CODES[type(value)]), *(item for pair in zip(keys, values, strict=True) for item in pair)]


def _lower_array(value: np.ndarray[Any, Any], _: int) -> list[Any]:
    return [_head(_ARRAY), _dtype_name(value.dtype), list(value.shape), value.tobytes()]


def _lower_scalar(value: np.generic[Any]) -> list[Any]:
    if type(value) is not value.dtype.type:
        raise _Refused(f"{type_name(value)} cannot be kept in a state; {_KEPT}")
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
    raise ValueError(f"an unexpected {shown(value)}")


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
        raise ValueError(f"{type_name(value)} in place of text")
    return value


def _lift_array(name: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    # Only names that `_dtype_name` gives: NumPy reads much more into a text, some of it deprecated, some of it objects.
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"dtype {shown(name)}")
    dtype = np.dtype(name)
    fits = all(map(is_count, shape)) and math.prod(shape) * dtype.itemsize == len(data)
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
        raise ValueError(f"{type_name(cast('object', array))} in place of the array of a tensor")
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


def read_safely(read: Callable[..., Any], *arguments: object) -> Any:
    """Calls `read`; whatever is wrong with the data, the error is a `StateError`."""
    try:
        return read(*arguments)
    except StateError:
        raise
    except _UNREADABLE as error:
        raise StateError(f"the state cannot be read: {error}") from error


def type_name(value: object) -> str:
    """Its type as one writes it: `int`, `numpy.ndarray`."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def shown(value: object) -> str:
    """The value for the text of an error, at most 80 characters."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # an integer of more than 4300 digits has no repr
        text = "<a very large value>"
    except Exception:  # noqa: BLE001 - the text is wanted for an error of ours
        text = f"<{type_name(value)}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_count(value: object) -> bool:
    """Whether it is an int from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value <= MAX_COUNT
