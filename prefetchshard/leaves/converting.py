"""Converts host leaves to NumPy arrays, and rejects those that no device can hold.

Tensors of other libraries are recognised by their attributes, so that no library is imported.
"""

from __future__ import annotations

import inspect
import mmap
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.errors import BatchError, LeafTypeError, NarrowingError, PlacementError
from prefetchshard.base.memory import AnyArray
from prefetchshard.base.number_lists import NUMPY_SCALARS as NUMPY_SCALARS  # also for those who import this module
from prefetchshard.base.number_lists import numbers_in, ragged_at
from prefetchshard.leaves.on_devices import values_of

_OPAQUE_BYTES = (bytearray, mmap.mmap)
_NO_FORM = {"float6_e2m3fn", "float6_e3m2fn", "complex32", "bcomplex32"}  # dtypes of ml_dtypes that JAX's runtime does not support


def as_array(leaf: Any, path: str = "") -> AnyArray:
    """The leaf as a NumPy array, without a copy if possible.

    Args:
        leaf: a NumPy array or scalar, a Python number, a list of numbers (nested or not), a torch or TensorFlow tensor, or anything with
            `__array__`, `__dlpack__` or a buffer of numbers.
        path: path of the leaf, for error messages.

    Raises:
        LeafTypeError: the leaf is text, an object, a date, a structured or masked array, a sparse tensor or a PRNG key.
        PlacementError: the leaf is a jax.Array that was deleted.
        NarrowingError: the leaf is, or holds, a Python integer beyond 64 bits.
        BatchError: the leaf is a ragged list.
    """
    if type(leaf) is np.ndarray:
        array = leaf
    elif isinstance(leaf, np.ma.MaskedArray):
        raise LeafTypeError(path, "a masked array", "fill it (`x.filled(value)`) and pass its mask as a leaf of its own")
    elif isinstance(leaf, np.ndarray):
        array = leaf.view(np.ndarray)
    else:
        array = _foreign(leaf, path)
    if not is_numeric(array.dtype):
        raise LeafTypeError(path, f"dtype {array.dtype}")
    return array


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a device can hold the dtype: bool, numbers up to complex128, and the small floats and integers of ml_dtypes."""
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.type.__module__.split(".")[0] == "ml_dtypes" and dtype.name not in _NO_FORM


def is_a(value: Any, kind: Any) -> bool:
    """`isinstance` without narrowing: a type checker would narrow `value` to a generic type with unknown parameters."""
    return isinstance(value, kind)


def _foreign(leaf: Any, path: str) -> AnyArray:
    kind = cast("Any", type(leaf))
    if kind is list:
        return _from_list(leaf, path)
    if isinstance(leaf, (bool, float, complex, np.generic)):
        return np.asarray(leaf)
    if isinstance(leaf, int):
        return _python_int(leaf, path)
    if isinstance(leaf, (str, bytes)):
        raise LeafTypeError(path, f"{kind.__name__} {leaf[:30]!r}")
    if is_torch(leaf):
        return _from_torch(leaf, path)
    if isinstance(leaf, jax.Array):
        return _from_jax(leaf, path)
    for offers, convert in _WAYS.items():
        if hasattr(leaf, offers):
            return _converted(leaf, path, convert)
    if not isinstance(leaf, _OPAQUE_BYTES) and _has_buffer(leaf):
        return _converted(leaf, path, np.asarray)
    raise _no_array(leaf, path)


def _no_array(leaf: Any, path: str) -> LeafTypeError:
    if inspect.iscoroutine(leaf):
        advice = "it comes of an async function, which nobody awaits: make that a plain one, or pass an async generator as the source"
        return LeafTypeError(path, "a coroutine", advice)
    kind = cast("Any", type(leaf))
    return LeafTypeError(
        path,
        f"an object of type {kind.__module__}.{kind.__qualname__}",
        f"if {kind.__qualname__} is a container, register it (`jax.tree_util.register_dataclass`, `register_pytree_node`) or convert it to a "
        f"dict or a tuple; if it is a value, keep it on the host (ps.HOST in its place of `sharding=`) or convert it in `transform`",
    )


_WAYS: dict[str, Callable[[Any], AnyArray]] = {"__array__": np.asarray, "__array_interface__": np.asarray, "__dlpack__": np.from_dlpack}


def _converted(leaf: Any, path: str, convert: Callable[[Any], AnyArray]) -> AnyArray:
    try:
        return convert(leaf)
    except (TypeError, ValueError, BufferError) as error:
        kind = cast("Any", type(leaf))
        raise LeafTypeError(path, f"an object of type {kind.__module__}.{kind.__qualname__}, of which NumPy makes no array,") from error
    except Exception as error:  # raised by the leaf's own code
        error.add_note(f"leaf {path or '(the batch itself)'}")
        raise


def _has_buffer(leaf: Any) -> bool:
    try:
        memoryview(leaf).release()
    except (TypeError, BufferError):
        return False
    return True


def _python_int(leaf: int, path: str) -> AnyArray:
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(leaf, dtype)
        except OverflowError:
            continue
    raise NarrowingError(f"leaf {path or '(the batch itself)'}: the integer {leaf} has more than 64 bits; keep it on the host with ps.HOST")


def _from_list(leaf: list[Any], path: str) -> AnyArray:
    name = path or "(the batch itself)"
    try:
        array = np.asarray(leaf)
    except ValueError:
        raise BatchError(
            f"leaf {name}: the list is ragged: {ragged_at(leaf)}; pad or cut its parts in `transform`, or where batches are made of examples "
            f"in `collate`, or keep it on the host (host=({path!r},))"
        ) from None
    if array.dtype == object or (array.dtype.kind == "f" and all(isinstance(number, int) for number in numbers_in(leaf))):
        raise NarrowingError(
            f"leaf {name}: no type of 64 bits holds all integers of the list, from {min(numbers_in(leaf))} to {max(numbers_in(leaf))}; keep "
            f"it on the host (host=({path!r},))"
        )
    return array


def is_torch(leaf: Any) -> bool:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")  # a tensor exists only if something imported torch
    return torch is not None and isinstance(leaf, getattr(torch, "Tensor", ()))


def _from_jax(leaf: Any, path: str) -> AnyArray:
    if not is_a(leaf.dtype, np.dtype):
        raise LeafTypeError(path, f"an array of {leaf.dtype} among numbers", "let each example have PRNG keys there, or none")
    if leaf.is_deleted():
        raise deleted(leaf, path)
    return _converted(leaf, path, values_of)


def deleted(array: Any, path: str) -> PlacementError:
    """The error for a jax.Array without memory."""
    return PlacementError(
        f"leaf {path or '(the batch itself)'}: the jax.Array of shape {array.shape} was deleted before it was placed, most likely donated to a "
        f"jitted function: let the source yield NumPy arrays, or new jax.Arrays"
    )


def _from_torch(leaf: Any, path: str) -> AnyArray:
    tensor = leaf.detach()
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided" or getattr(tensor, "is_quantized", False):
        raise LeafTypeError(path, "a sparse or quantized torch tensor", "make it dense (`x.to_dense()`, `x.dequantize()`) first")
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError as error:  # a dtype that NumPy lacks
        bits = _torch_bits(tensor)
        if bits is None:
            raise LeafTypeError(path, f"dtype {tensor.dtype}") from error
        return bits


def _torch_bits(tensor: Any) -> AnyArray | None:
    """The tensor's memory, viewed as the ml_dtypes dtype of the same name; no value is converted."""
    import ml_dtypes  # a dependency of jax; imported only when such a tensor comes

    torch = sys.modules["torch"]
    target = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    integers = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size())
    if target is None or integers is None:
        return None
    return tensor.view(integers).numpy().view(target)


def check_example(path: str, row: int, got: AnyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check that an example's leaf has the shape and dtype of its batch.

    Nothing is cast: thread timing decides which example sets the dtype, so a cast would make the result depend on timing.

    Raises:
        BatchError: it does not; the message names leaf, row, and both shapes or dtypes.
    """
    name = path or "(the example itself)"
    if got.shape != shape:
        raise BatchError(
            f"leaf {name}: the example at row {row} has shape {got.shape}, others of its batch have {shape}; "
            f"pad or cut it in `transform`, or stack such examples in `collate`"
        )
    if got.dtype != dtype and got.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        raise BatchError(
            f"leaf {name}: the example at row {row} has dtype {got.dtype}, others of its batch have {dtype}; cast it in `transform`, "
            f"so that every batch has one dtype"
        )


def check_key(path: str, row: int, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Check that an example's PRNG keys have the shape and dtype of its batch.

    Raises:
        BatchError: they do not; the message names leaf, row, and both shapes and dtypes.
    """
    if not isinstance(got, jax.Array) or got.dtype != dtype or got.shape != shape:
        what = f"{got.dtype}{list(got.shape)}" if isinstance(got, jax.Array) else f"an object of type {type(got).__qualname__}"
        raise BatchError(
            f"leaf {path or '(the example itself)'}: the example at row {row} has {what}, others of its batch have keys, {dtype}{list(shape)}"
        )
