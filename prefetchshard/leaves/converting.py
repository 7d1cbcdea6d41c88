"""What a leaf on the host may be, and its NumPy array.

Foreign tensors are recognised by what they offer, never by importing their library.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.errors import BatchError, LeafTypeError, NarrowingError
from prefetchshard.base.memory import AnyArray

_OPAQUE_BYTES = (bytearray, mmap.mmap)
_NO_FORM = {"float6_e2m3fn", "float6_e3m2fn", "complex32", "bcomplex32"}  # of ml_dtypes, unknown to JAX's runtime


NUMPY_SCALARS: frozenset[type] = frozenset(cast("Any", kind) for kind in np.sctypeDict.values() if issubclass(kind, (np.bool_, np.number)))
"""NumPy's own numbers, which have a dtype and a shape as arrays do."""


def as_array(leaf: Any, path: str = "") -> AnyArray:
    """The leaf as a NumPy array, sharing its memory where that can be.

    Args:
        leaf: a NumPy array or scalar, a Python number, a torch or TensorFlow tensor, or anything with `__array__`, `__dlpack__` or a
            buffer of numbers.
        path: of the leaf, for the errors.

    Raises:
        LeafTypeError: text, objects, dates, structured and masked arrays, sparse tensors, PRNG keys.
        NarrowingError: a Python integer beyond 64 bits.
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
    """Whether a device can hold it: bool, numbers up to 128 bits of complex, and the small floats and integers of ml_dtypes."""
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.type.__module__.split(".")[0] == "ml_dtypes" and dtype.name not in _NO_FORM


def is_a(value: Any, kind: Any) -> bool:
    """`isinstance` that leaves the value `Any` to a type checker, which would else narrow it to a type with unknown parameters."""
    return isinstance(value, kind)


def _foreign(leaf: Any, path: str) -> AnyArray:
    kind = cast("Any", type(leaf))
    if isinstance(leaf, (bool, float, complex, np.generic)):
        return np.asarray(leaf)
    if isinstance(leaf, int):
        return _python_int(leaf, path)
    if isinstance(leaf, (str, bytes)):
        raise LeafTypeError(path, f"{kind.__name__} {leaf[:30]!r}")
    if _is_torch(leaf):
        return _from_torch(leaf, path)
    if isinstance(leaf, jax.Array) and not is_a(leaf.dtype, np.dtype):
        raise LeafTypeError(path, f"an array of {leaf.dtype} among numbers", "let each example have PRNG keys there, or none")
    for offers, convert in _WAYS.items():
        if hasattr(leaf, offers):
            return _converted(leaf, path, convert)
    if not isinstance(leaf, _OPAQUE_BYTES) and _has_buffer(leaf):
        return _converted(leaf, path, np.asarray)
    raise LeafTypeError(
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
    except Exception as error:  # e.g. a jax.Array that was deleted
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


def _is_torch(leaf: Any) -> bool:
    torch = sys.modules.get("torch")  # imported by whoever made the tensor
    return torch is not None and isinstance(leaf, getattr(torch, "Tensor", ()))


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
    """A view of the bits under the dtype of the same name in ml_dtypes: the values are never converted."""
    import ml_dtypes  # comes with jax; imported by the first such tensor only

    torch = sys.modules["torch"]
    target = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    integers = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size())
    if target is None or integers is None:
        return None
    return tensor.view(integers).numpy().view(target)


def check_example(path: str, row: int, got: AnyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Whether an example's leaf stacks with those of the others.

    Nothing is cast: which example set the shape and dtype depends on the threads, and whether the others fit must not.

    Raises:
        BatchError: names leaf, row, and both shapes or dtypes.
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
    """Whether an example's PRNG keys stack with those of the others.

    Raises:
        BatchError: names leaf, row and what differs.
    """
    if not isinstance(got, jax.Array) or got.dtype != dtype or got.shape != shape:
        what = f"{got.dtype}{list(got.shape)}" if isinstance(got, jax.Array) else f"an object of type {type(got).__qualname__}"
        raise BatchError(
            f"leaf {path or '(the example itself)'}: the example at row {row} has {what}, others of its batch have keys, {dtype}{list(shape)}"
        )
