"""What a leaf on the host may be, and how its values get into memory of another dtype without changing.

Foreign tensors are recognised by what they offer, never by importing their library.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchshard.config import Narrow
from prefetchshard.errors import BatchError, LeafTypeError, NarrowingError, SourceError

AnyArray = NDArray[Any]

_NARROWED = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), np.generic)
# What torch has and NumPy lacks goes through a view of the bits; the values are never converted.
_TORCH_BITS = {
    "torch.bfloat16": ("uint8", "bfloat16"),
    "torch.float8_e4m3fn": ("uint8", "float8_e4m3fn"),
    "torch.float8_e5m2": ("uint8", "float8_e5m2"),
    "torch.float8_e4m3fnuz": ("uint8", "float8_e4m3fnuz"),
    "torch.float8_e5m2fnuz": ("uint8", "float8_e5m2fnuz"),
}


def as_array(leaf: Any, path: str = "") -> AnyArray:
    """The leaf as a NumPy array, sharing its memory where that can be.

    Args:
        leaf: a NumPy array or scalar, a Python number, a torch or TensorFlow tensor, or anything with `__array__` or `__dlpack__`.
        path: of the leaf, for the errors.

    Raises:
        LeafTypeError: text, objects, dates, structured and masked arrays, sparse tensors.
        NarrowingError: a Python integer beyond 64 bits.
    """
    if type(leaf) is np.ndarray:
        array = leaf
    elif isinstance(leaf, np.ma.MaskedArray):
        raise LeafTypeError(path, "a masked array", "fill it (`x.filled(value)`) and pass its mask as a leaf of its own")
    elif isinstance(leaf, np.ndarray):
        array = leaf.view(np.ndarray) if type(leaf) is not np.memmap else np.asarray(leaf)
    else:
        array = _foreign(leaf, path)
    if not is_numeric(array.dtype):
        raise LeafTypeError(path, f"dtype {array.dtype}")
    return array


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a device can hold it: bool, numbers up to 128 bits of complex, and the small floats and integers of ml_dtypes."""
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.type.__module__.split(".")[0] == "ml_dtypes"


def _foreign(leaf: Any, path: str) -> AnyArray:
    kind = type(leaf)
    if kind is bool or kind is float or kind is complex or isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, int):
        return _python_int(leaf, path)
    if isinstance(leaf, (str, bytes)):
        raise LeafTypeError(path, f"{kind.__name__} {leaf[:30]!r}")
    if kind.__module__.split(".")[0] == "torch" and hasattr(leaf, "detach"):
        return _from_torch(leaf, path)
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    if hasattr(leaf, "__dlpack__"):
        return np.from_dlpack(leaf)
    raise LeafTypeError(
        path,
        f"an object of type {kind.__module__}.{kind.__qualname__}",
        f"if {kind.__qualname__} is a container, register it (`jax.tree_util.register_dataclass`, `register_pytree_node`); "
        f"if it is a value, keep it on the host with ps.HOST or convert it in `transform`",
    )


def _python_int(leaf: int, path: str) -> AnyArray:
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(leaf, dtype)
        except OverflowError:
            continue
    raise NarrowingError(f"leaf {path or '(the batch itself)'}: the integer {leaf} has more than 64 bits; keep it on the host with ps.HOST")


def _from_torch(leaf: Any, path: str) -> AnyArray:
    tensor = leaf.detach()
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided" or getattr(tensor, "is_quantized", False):
        raise LeafTypeError(path, "a sparse or quantized torch tensor", "make it dense (`x.to_dense()`, `x.dequantize()`) first")
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    bits = _TORCH_BITS.get(str(tensor.dtype))
    if bits is None:
        return tensor.numpy()
    import ml_dtypes  # comes with jax; imported by the first such tensor only

    torch = sys.modules["torch"]
    target = np.dtype(getattr(ml_dtypes, bits[1]))
    if tensor.dim() == 0:
        return _from_torch(leaf.reshape(1), path).reshape(())
    if target.itemsize == 2:
        return tensor.view(torch.int16).numpy().view(target)
    return tensor.view(torch.uint8).numpy().view(target)


def canonical(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any]:
    """The dtype that JAX gives it: native byte order, 32 bits for 64 while x64 is off."""
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    return dtype if x64 else _NARROWED.get(dtype, dtype)


def narrows(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether values can be lost on the way from one to the other."""
    return source.itemsize > target.itemsize


def refuse_narrowing(path: str, source: np.dtype[Any], target: np.dtype[Any]) -> NarrowingError:
    """The error of `narrow="error"`."""
    return NarrowingError(
        f"leaf {path or '(the batch itself)'}: {source} would become {target} because x64 is off and narrow='error'; "
        f"cast it in the source or `transform`, run under `jax.enable_x64(True)`, or pass narrow='check'"
    )


def store(view: AnyArray, value: AnyArray, *, path: str, policy: Narrow, row: int = 0) -> None:
    """Copy `value` into `view`, which has the same shape and the canonical dtype.

    Args:
        view: `(rows, *example)`, written.
        value: `(rows, *example)`, of the source's dtype.
        path: of the leaf, for the error.
        policy: what happens to 64-bit values that do not survive; see `Loader(narrow=)`.
        row: the row of the batch at which `view` begins, for the error.

    Raises:
        NarrowingError: under "check", names leaf, row and value.
    """
    if value.dtype == view.dtype or not narrows(value.dtype, view.dtype):
        np.copyto(view, value, casting="same_kind")
    elif policy == "allow":
        with np.errstate(all="ignore"):
            np.copyto(view, value, casting="unsafe")
    elif value.dtype.kind in "iu":
        _store_integers(view, value, path, row)
    else:
        _store_floats(view, value, path, row)


def _store_integers(view: AnyArray, value: AnyArray, path: str, row: int) -> None:
    bounds = np.iinfo(view.dtype)
    if value.size and (value.max() > bounds.max or (value.dtype.kind == "i" and value.min() < bounds.min)):
        raise _lost(view, value, (value > bounds.max) | (value < bounds.min), path, row)
    np.copyto(view, value, casting="unsafe")


def _store_floats(view: AnyArray, value: AnyArray, path: str, row: int) -> None:
    try:
        with np.errstate(over="raise", invalid="ignore", under="ignore"):  # the cast itself tells: no pass of its own
            np.copyto(view, value, casting="unsafe")
    except FloatingPointError:
        with np.errstate(all="ignore"):
            narrowed = value.astype(view.dtype)
        raise _lost(view, value, np.isinf(narrowed) & ~np.isinf(value), path, row) from None


def _lost(view: AnyArray, value: AnyArray, wrong: AnyArray, path: str, row: int) -> NarrowingError:
    index = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(wrong)))
    bad = np.atleast_1d(value)[index]
    where = f"row {row + index[0]}" + (f", index {list(index[1:])}" if len(index) > 1 else "") if value.ndim else "a scalar"
    return NarrowingError(
        f"leaf {path or '(the batch itself)'}: {where}: the {value.dtype} value {bad} does not fit {view.dtype}, to which it would be "
        f"converted because x64 is off; cast or split it in `transform`, run under `jax.enable_x64(True)`, or pass narrow='allow'"
    )


def stack_on_host(values: list[Any]) -> AnyArray:
    """One NumPy array `(rows, ...)` over values that stay on the host: text, numbers, objects, or arrays of equal shape."""
    first = values[0]
    if isinstance(first, (str, bytes, bool, int, float, complex, np.generic)) and all(type(v) is type(first) for v in values):
        array = np.array(values)
        if array.dtype.kind != "O" and array.ndim == 1:
            return array
    if all(isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype for v in values):
        return np.stack(values)
    objects = np.empty(len(values), object)
    for i, value in enumerate(values):  # an assignment of the list would look into nested sequences
        objects[i] = value
    return objects


def own_on_host(value: Any) -> Any:
    """A value that stays on the host, with the arrays in its containers copied: the source may overwrite them."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is list:
        return [own_on_host(v) for v in value]
    if type(value) is tuple:
        return tuple(own_on_host(v) for v in value)
    if type(value) is dict:
        return {k: own_on_host(v) for k, v in value.items()}
    return value


def own_leaf(leaf: Any) -> Any:
    """A leaf of an item that is handed to another thread while the source may already overwrite it.

    Raises:
        SourceError: it can neither be shared nor copied.
    """
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if hasattr(leaf, "sharding"):  # jax.Array: immutable
        return leaf
    for way in ("clone", "copy"):
        if callable(getattr(leaf, way, None)) and hasattr(leaf, "__array__"):
            return getattr(leaf, way)()
    if isinstance(leaf, Mapping) and not isinstance(leaf, dict):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise SourceError(
            f"an item of type {type(leaf).__qualname__} cannot be copied, so it cannot be kept while the source goes on; "
            f"if the source makes a new object for each item, say so: reuses_buffers=False"
        ) from error


def check_example(path: str, row: int, got: AnyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Whether an example's leaf stacks with those of the first one.

    Raises:
        BatchError: names leaf, row, and both shapes or dtypes.
    """
    name = path or "(the example itself)"
    if got.shape != shape:
        raise BatchError(
            f"leaf {name}: the example at row {row} has shape {got.shape}, the batch has {shape}; "
            f"pad or cut it in `transform`, or stack such examples in `collate`"
        )
    if got.dtype != dtype and not np.can_cast(got.dtype, dtype, "safe"):
        raise BatchError(
            f"leaf {name}: the example at row {row} has dtype {got.dtype}, the first one had {dtype}; cast it in `transform`, "
            f"so that every batch has one dtype"
        )


def pad_value(path: str, value: float | bool, dtype: np.dtype[Any]) -> AnyArray:
    """The padding of a leaf in its own dtype.

    Raises:
        BatchError: the dtype cannot hold it.
    """
    try:
        return np.full((), value, dtype)
    except (OverflowError, ValueError, TypeError) as error:
        raise BatchError(f"leaf {path or '(the batch itself)'}: ps.Pad(value={value!r}) does not fit dtype {dtype}") from error
