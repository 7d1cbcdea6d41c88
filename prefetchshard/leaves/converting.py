"""What a leaf on the host may be, and how its values get into memory of another dtype without changing.

Foreign tensors are recognised by what they offer, never by importing their library.
"""

from __future__ import annotations

import copy
import math
import mmap
import operator
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from prefetchshard.base.config import Narrow
from prefetchshard.base.errors import BatchError, LeafTypeError, NarrowingError, SourceError

AnyArray = NDArray[Any]

_jax: Any = jax  # JAX types trees only in part
_LEAF = _jax.tree_util.tree_structure(0)

_NARROWED = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), np.generic, jax.Array)
_OPAQUE_BYTES = (bytearray, mmap.mmap)
_NO_FORM = {"float6_e2m3fn", "float6_e3m2fn", "complex32", "bcomplex32"}  # of ml_dtypes, unknown to JAX's runtime


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


def _is(value: Any, kind: Any) -> bool:
    """`isinstance`, after which a type checker still takes the value for anything."""
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
    if isinstance(leaf, jax.Array) and not _is(leaf.dtype, np.dtype):
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
    torch = sys.modules.get("torch")  # who has a tensor has imported it
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


def store(view: AnyArray, value: AnyArray, *, path: str, policy: Narrow, row: int | None = 0) -> None:
    """Copy `value` into `view`, which has the same shape and the canonical dtype.

    Args:
        view: `(rows, *example)`, or of any shape where `row` is None; written.
        value: of the same shape, of the source's dtype.
        path: of the leaf, for the error.
        policy: what happens to 64-bit values that do not survive; see `Loader(narrow=)`.
        row: the row of the batch at which `view` begins, for the error; None for a leaf without rows.

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


def _store_integers(view: AnyArray, value: AnyArray, path: str, row: int | None) -> None:
    bounds = np.iinfo(view.dtype)
    if value.size and (value.max() > bounds.max or (value.dtype.kind == "i" and value.min() < bounds.min)):
        raise _lost(view, value, (value > bounds.max) | (value < bounds.min), path, row)
    np.copyto(view, value, casting="unsafe")


def _store_floats(view: AnyArray, value: AnyArray, path: str, row: int | None) -> None:
    try:
        with np.errstate(over="raise", invalid="ignore", under="ignore"):  # the cast itself tells: no pass of its own
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


def private_copy(value: Any, *, deep: bool = False) -> Any:
    """The value with copies of all arrays, tensors and lists in it: whoever changes it, or what it came from, leaves the other alone.

    Args:
        value: anything.
        deep: copy other objects too, where they can be copied.

    Raises:
        SourceError: `deep`, and there is an object that cannot be copied.
    """
    kind = cast("Any", type(value))
    if _is_immutable(value):
        return value
    if _is(value, np.ndarray):
        return _own_array(value, deep)
    if kind is dict:
        return {k: private_copy(v, deep=deep) for k, v in value.items()}
    if kind is list:
        return [private_copy(v, deep=deep) for v in value]
    if kind is memoryview:
        copied: Any = np.array(value)
        return memoryview(copied)
    children = _children(value)
    if children is not None:
        parts, rebuild = children
        return rebuild([private_copy(part, deep=deep) for part in parts])
    return _own_object(value, deep)


def _base_references(array: AnyArray) -> int:
    return sys.getrefcount(array.base)


_counts_references = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
_ALONE = next(map(sys.getrefcount, [np.empty(1)]))  # in one list, and nowhere else
_BASE_ALONE = _base_references(np.empty(1)[:])  # held by one view, and by nobody else


def are_unshared(leaves: list[Any]) -> bool:
    """Whether nothing but this list leads to the memory of these leaves, so that whoever made them cannot overwrite it.

    Told by CPython's counts of references; False where they do not tell.
    """
    if not _counts_references:
        return False
    counts = list(map(sys.getrefcount, leaves))  # before anything here refers to a leaf
    return all(_is_unshared(leaf, count) for leaf, count in zip(leaves, counts, strict=True))


def _is_unshared(leaf: Any, references: int) -> bool:
    if type(leaf) is not np.ndarray:
        return _is_immutable(leaf)
    if references != _ALONE or leaf.dtype.hasobject or weakref.getweakrefcount(leaf):
        return False
    if leaf.flags.owndata:
        return True
    is_alone = _base_references(leaf) == _BASE_ALONE
    base = leaf.base
    return is_alone and type(base) is np.ndarray and base.flags.owndata and not weakref.getweakrefcount(base)


def _is_immutable(value: Any) -> bool:
    return _is(value, _IMMUTABLE) and not _is(value, np.void)  # which is a view


def _own_array(array: AnyArray, deep: bool) -> AnyArray:
    copied = array.copy()
    if array.dtype == object:
        for index, value in np.ndenumerate(array):
            copied[index] = private_copy(value, deep=deep)
    return copied


def _own_object(value: Any, deep: bool) -> Any:
    for way in ("clone", "copy"):  # tensors; deepcopy refuses those with a gradient
        if callable(getattr(value, way, None)) and (isinstance(value, np.void) or hasattr(value, "__array__")):
            return getattr(value, way)()
    if not deep:
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise SourceError(
            f"an item of type {type(value).__qualname__} cannot be copied, so it cannot be kept while the source goes on; "
            f"if the source makes a new object for each item, say so: reuses_buffers=False"
        ) from error


def _children(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What a container holds, and how to make one like it; None for what is not a container to JAX."""
    parts, tree = _jax.tree_util.tree_flatten(value, is_leaf=partial(operator.is_not, value))
    return None if tree == _LEAF else (parts, tree.unflatten)


def stack_on_host(values: list[Any], path: str, rows: int | None = None) -> Any:
    """NumPy arrays `(rows, ...)` over values that stay on the host.

    Containers keep their form, each place in them becomes an array. Lists are values: they, text and other objects come in an array of
    objects, so that nothing is cut to a common width.

    Args:
        values: of the examples.
        path: of the leaf, for the error.
        rows: to be filled up to, with 0, empty text, None, or what is masked; None: as many as there are values.

    Raises:
        BatchError: containers that differ in form.
    """
    first = values[0]
    if first is not None and type(first) is not list and (type(first) is dict or _children(first) is not None):
        return _stack_containers(values, path, rows)
    array = _stack_values(values)
    if rows is None or rows == len(values):
        return array
    whole = blank(array, (rows, *array.shape[1:]))
    if isinstance(first, (str, bytes)):
        whole[:] = type(first)()
    whole[: len(values)] = array
    return whole


def _stack_containers(values: list[Any], path: str, rows: int | None) -> Any:
    first: Any = values[0]
    kind = cast("Any", type(first))
    if kind is dict:
        if any(type(v) is not dict or v.keys() != first.keys() for v in values):
            raise _other_form(path)
        return {k: stack_on_host([v[k] for v in values], f"{path}.{k}", rows) for k in first}
    forms = [_jax.tree_util.tree_structure(v, is_leaf=partial(operator.is_not, v)) for v in values]
    if any(form != forms[0] for form in forms):
        raise _other_form(path)
    parts = zip(*(forms[0].flatten_up_to(v) for v in values), strict=True)
    return forms[0].unflatten([stack_on_host(list(part), f"{path}[{i}]", rows) for i, part in enumerate(parts)])


def _other_form(path: str) -> BatchError:
    return BatchError(
        f"leaf {path or '(the example itself)'}: the containers that stay on the host differ in form among the examples of a batch; give them "
        f"the same keys, or put each in a list ([value]), which is kept as it is"
    )


def _stack_values(values: list[Any]) -> AnyArray:
    first = values[0]
    if all(type(v) is type(first) for v in values):
        if _is(first, np.ndarray) and all(v.shape == first.shape and v.dtype == first.dtype for v in values):
            return np.ma.stack(values) if _is(first, np.ma.MaskedArray) else np.stack(values)
        if _is(first, np.generic) and not _is(first, (np.str_, np.bytes_)) and all(v.dtype == first.dtype for v in values):
            return np.array(values)
        if isinstance(first, (bool, float, complex)) or (isinstance(first, int) and all(-(2**63) <= v < 2**63 for v in values)):
            return np.array(values)
    objects = np.empty(len(values), object)
    for i, value in enumerate(values):  # an assignment of the list would look into nested sequences
        objects[i] = value
    return objects


def blank(like: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Memory for rows like those of an array that stays on the host: 0, empty text, None, or masked."""
    if like.dtype == object:
        return np.empty(shape, object)
    if isinstance(like, np.ma.MaskedArray):
        masked = np.ma.array(np.zeros(shape, like.dtype), mask=True)
        masked.fill_value = like.fill_value
        return masked
    return np.zeros(shape, like.dtype).view(type(like))


def check_example(path: str, row: int, got: AnyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Whether an example's leaf stacks with those of the others.

    Which of them decided on the shape and dtype depends on the threads, so nothing is cast: whether it fits must not depend on that.

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


def pad_value(path: str, value: float | bool, dtype: np.dtype[Any]) -> AnyArray:
    """The padding of a leaf in its own dtype.

    Raises:
        BatchError: the dtype cannot hold it: integers must survive exactly, floats may round but not overflow.
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
