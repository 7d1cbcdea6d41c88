"""The program of a worker process. It imports neither this package nor JAX, and nothing but NumPy beside the standard library.

It is run as a script. The parent imports the module too, for the few functions that both sides need (`rebuild`, `seed_words`).

The parent asks, this side answers, one after the other, over a socket. What is large lies in shared memory, of which the answer says where.
Each message is a header (`HEADER`: how many bytes follow) and a pickle; the file of new shared memory travels with the header.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import mmap
import operator
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

HEADER = struct.Struct("<Q")
ALIGNMENT = 64
LEAST_BYTES = 1 << 20
"""Shared memory is made at least so large."""
ATOMS = {str, bytes, bool, int, float, complex, type(None), *(np.dtype(code).type for code in "?bBhHiIlLqQefdgFDGmM")}

Array = Any


# -- what both sides need


def seed_words(*numbers: int) -> list[int]:
    """The words for a `SeedSequence`; see `ordering/epoch_order.py`, which says why they are these."""
    words = [len(numbers)]
    for number in numbers:
        count = -(-number.bit_length() // 32)
        words.append(count)
        words.extend(number >> 32 * place & 0xFFFFFFFF for place in range(count))
    return words


def rebuild(structure: tuple[Any, ...], leaves: Iterator[Any]) -> Any:
    """An example of this structure, from its leaves in order."""
    kind = structure[0]
    if kind == "dict":
        return {key: rebuild(part, leaves) for key, part in zip(structure[1], structure[2], strict=True)}
    if kind in ("list", "tuple"):
        parts = [rebuild(part, leaves) for part in structure[1]]
        return parts if kind == "list" else tuple(parts)
    return None if kind == "none" else next(leaves)


def make_memory(size: int) -> int:
    """The file of new shared memory, which has no name: it is gone with the last process that holds it.

    Raises:
        OSError: there is not so much.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("prefetchshard", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # a shortage is an error here, not a SIGBUS later
    except BaseException:
        os.close(fd)
        raise
    return fd


def places(sizes: Sequence[int], first: int = 0) -> tuple[list[int], int]:
    """Where buffers of these sizes lie, and where the last one ends."""
    found: list[int] = []
    end = first
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        found.append(start)
        end = start + size
    return found, end


# -- memory


class Memory:
    """Shared memory that this side writes, made anew where more is needed.

    Attributes:
        new: its file and its size, until they are sent.
    """

    def __init__(self) -> None:
        self.map: mmap.mmap | None = None
        self.new: tuple[int, int] | None = None
        self._size = 0

    def room(self, size: int) -> mmap.mmap:
        """Memory of at least this size. What was in it before is lost.

        Raises:
            NoMemoryError: there is not so much.
        """
        if self.map is None or size > self._size:
            self.forget_new()
            self.map = None  # before the new one is made: it is never needed again
            whole = max(LEAST_BYTES, size + size // 4)
            try:
                fd = make_memory(whole)
                try:
                    self.map = mmap.mmap(fd, whole)
                except BaseException:
                    os.close(fd)
                    raise
            except (OSError, ValueError, MemoryError) as error:
                raise NoMemoryError(f"there is no shared memory for {whole:,} bytes of what it made: {error}") from error
            self.new, self._size = (fd, whole), whole
        return self.map

    def forget_new(self) -> None:
        """The file was sent, or is not wanted."""
        new, self.new = self.new, None
        if new is not None:
            os.close(new[0])


class NoMemoryError(Exception):
    """There is no shared memory."""


class RefusedError(Exception):
    """What the parent raises as a SourceError with this text."""


class CarriedError(Exception):
    """Carries a StopIteration of the user's out of a generator, as its cause."""


class ReturnedNoneError(Exception):
    """A function returned None: args[0] is its name."""


def called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function of the user's returns, where a generator calls it."""
    try:
        return function(*args, **options)
    except StopIteration as error:
        raise CarriedError from error


# -- examples, leaf by leaf


def numeric(dtype: Any) -> bool:
    """Whether an array of it holds plain numbers."""
    return dtype.kind in "biufc" or dtype.type.__module__.split(".")[0] == "ml_dtypes"


_PYTHON = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float64), complex: np.dtype(np.complex128)}
_ARRAYS = (np.ndarray, np.memmap)


def take_apart(node: Any, leaves: list[Any]) -> tuple[Any, ...] | None:
    """The structure of an example of plain containers; None where it is not one. Adds its leaves."""
    kind: Any = type(node)  # pyright: ignore[reportUnknownVariableType]
    if kind in _ARRAYS:
        leaves.append(node)
        return ("array",) if numeric(node.dtype) else None
    if kind is dict:
        keys = tuple(node)
        if not all(type(key) is str or type(key) is int for key in keys):
            return None
        parts = [take_apart(part, leaves) for part in node.values()]
        return None if None in parts else ("dict", keys, tuple(parts))
    if kind in _PYTHON or kind is str or kind is bytes:
        leaves.append(node)
        return (kind.__name__,)
    if issubclass(kind, np.generic):
        leaves.append(node)
        return ("scalar",) if numeric(node.dtype) else None
    if kind is tuple or kind is list:
        # A list of numbers is one leaf, which the parent decides
        if kind is list and any(type(part) is list or type(part) in _PYTHON for part in node):
            return None
        parts = [take_apart(part, leaves) for part in node]
        return None if None in parts else (kind.__name__, tuple(parts))
    return ("none",) if node is None else None


class Stack:
    """The examples of a run, each written to its row of shared memory as it comes: the source may make them all in one buffer.

    Args:
        memory: for the rows.
        count: of the examples.

    Attributes:
        structure: of the examples; None before the first one.
        columns: of each leaf dtype, shape and where its rows lie; for text, the list of the values.
    """

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._count = count
        self._rows = 0
        self._views: list[Any] = []
        self._fields: list[tuple[Any, Any, Any, Any, Any]] = []  # see `_add_like_the_first`
        self.structure: tuple[Any, ...] | None = None
        self.columns: list[Any] = []

    def add(self, example: Any) -> bool:
        """Write the next one. False: it is unlike the others, or none that can be stacked."""
        if self._fields and self._add_like_the_first(example):
            self._rows += 1
            return True
        leaves: list[Any] = []
        structure = take_apart(example, leaves)
        if structure is None or not leaves:
            return False
        if self.structure is None:
            self._open(structure, leaves)
        elif structure != self.structure:
            return False
        row = self._rows
        for column, view, leaf in zip(self.columns, self._views, leaves, strict=True):
            if view is None:
                column.append(leaf)
                continue
            if type(leaf) in _PYTHON:
                try:
                    view[row] = leaf
                except OverflowError:
                    return False
                continue
            if leaf.dtype != column[0] or leaf.shape != column[1]:
                return False
            view[row] = leaf
        self._rows += 1
        return True

    def _open(self, structure: tuple[Any, ...], leaves: list[Any]) -> None:
        forms = [
            None if type(leaf) in (str, bytes) else (_PYTHON[type(leaf)], ()) if type(leaf) in _PYTHON else (leaf.dtype, leaf.shape)
            for leaf in leaves
        ]
        sizes = [0 if form is None else self._count * form[0].itemsize * int(np.prod(form[1], dtype=np.int64)) for form in forms]
        starts, end = places(sizes)
        room = self._memory.room(max(1, end))
        for form, start in zip(forms, starts, strict=True):
            if form is None:
                self.columns.append([])
                self._views.append(None)
                continue
            dtype, shape = form
            self.columns.append((dtype, shape, start))
            self._views.append(np.ndarray((self._count, *shape), dtype, room, start))
        self.structure = structure
        if structure[0] == "dict" and all(part[0] in ("array", "scalar") for part in structure[2]):
            parts = zip(structure[1], self._views, forms, leaves, strict=True)
            self._fields = [(key, view, type(leaf), *cast("Any", form)) for key, view, form, leaf in parts]

    def _add_like_the_first(self, example: Any) -> bool:
        """Write a dict of arrays and scalars in the shortest way, as most examples are such. False: it is to be looked at closely."""
        if type(example) is not dict or len(cast("Any", example)) != len(self._fields):
            return False
        row = self._rows
        for (key, view, kind, dtype, shape), (its_key, leaf) in zip(self._fields, cast("Any", example).items(), strict=True):
            if its_key != key or type(leaf) is not kind or leaf.dtype != dtype or leaf.shape != shape:
                return False
            view[row] = leaf
        return True

    def examples(self) -> Iterator[Any]:
        """Those that were written, one by one."""
        for row in range(self._rows):
            yield self.example(row)

    def example(self, row: int) -> Any:
        assert self.structure is not None
        leaves = [column[row] if view is None else _value(view[row]) for column, view in zip(self.columns, self._views, strict=True)]
        kinds = iter(leaf_kinds(self.structure))
        return rebuild(self.structure, (value.item() if next(kinds) in PYTHON_NUMBERS else value for value in leaves))


PYTHON_NUMBERS = {kind.__name__ for kind in _PYTHON}


def _value(row: Any) -> Any:
    return row.copy() if _is(row, np.ndarray) else row


def leaf_kinds(structure: tuple[Any, ...]) -> Iterator[str]:
    kind = structure[0]
    if kind in ("dict", "list", "tuple"):
        for part in structure[-1]:
            yield from leaf_kinds(part)
    elif kind != "none":
        yield kind


# -- pickles with what is large beside them


def dumped(value: Any, plain: Any = pickle) -> tuple[bytes, list[Any]]:
    """The pickle of a value and the buffers beside it."""
    buffers: list[Any] = []

    def beside(buffer: Any) -> bool:
        if (raw := buffer.raw()).nbytes < 512:
            return True
        buffers.append(raw)
        return False

    return plain.dumps(value, protocol=5, buffer_callback=beside), buffers


def cloudpickle_if_there() -> Any:
    """The module, or None where it is not installed."""
    try:
        import cloudpickle  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError:
        return None
    return cast("Any", cloudpickle)


def by_either(dump: Callable[[Any], Any]) -> Any:
    """What `dump` makes with pickle, or with cloudpickle where pickle cannot and it is there."""
    try:
        return dump(pickle)
    except Exception:
        by_value = cloudpickle_if_there()
        if by_value is None:
            raise
        return dump(by_value)


def dumped_somehow(value: Any) -> tuple[bytes, list[Any]]:
    """As `dumped`, by cloudpickle where pickle cannot and it is there."""
    return by_either(lambda plain: dumped(value, plain))


# -- copies


def private_copy(value: Any) -> Any:
    """A copy that shares no array, list or dict with the value: what functions do to an item must not reach the source."""
    kind = cast("Any", type(value))
    if kind is dict:  # most examples are dicts, and this spares a call for each number and array
        copies: dict[Any, Any] = {}
        for key, part in value.items():
            of = cast("Any", type(part))
            if of is np.ndarray and not part.dtype.hasobject:
                copies[key] = part.copy()
            else:
                copies[key] = part if of in ATOMS else private_copy(part)
        return copies
    if kind in ATOMS or (_is(value, np.generic) and not _is(value, np.void)):
        return value
    if _is(value, np.ndarray):
        copied: Any = value.copy()
        if copied.dtype == object:
            for index, part in np.ndenumerate(value):
                copied[index] = private_copy(part)
        return copied
    if kind is list or kind is tuple:
        parts: list[Any] = [private_copy(part) for part in value]
        return parts if kind is list else tuple(parts)
    return _other_copy(value, kind)


def _other_copy(value: Any, kind: Any) -> Any:
    if _is(value, collections.OrderedDict):
        return collections.OrderedDict((key, private_copy(part)) for key, part in value.items())
    if _is(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory, {key: private_copy(part) for key, part in value.items()})
    if _is(value, tuple) and hasattr(value, "_fields"):
        return kind(*(private_copy(part) for part in value))
    if kind is memoryview:
        copied: Any = np.array(value)
        return memoryview(copied)
    for way in ("clone", "copy"):
        if callable(getattr(value, way, None)) and (_is(value, np.void) or hasattr(value, "__array__")):
            return value if "jax" in kind.__module__ else getattr(value, way)()
    return _copied_by_jax(value)


def _is(value: Any, kind: Any) -> bool:
    """`isinstance`, without what a type checker makes of it."""
    return isinstance(value, kind)


def _copied_by_jax(value: Any) -> Any:
    jax: Any = sys.modules.get("jax")  # who registers a container has imported it
    if jax is None:
        return value
    parts, tree = jax.tree_util.tree_flatten(value, is_leaf=functools.partial(operator.is_not, value))
    if len(parts) == 1 and parts[0] is value:
        return value
    return tree.unflatten([private_copy(part) for part in parts])


def filled(template: Any, leaves: Sequence[Any], row: int) -> Any:
    """An example from rows of arrays: the template has the number of a leaf in each place."""
    kind = cast("Any", type(template))
    if kind is int:
        return leaves[template][row]
    if kind is dict:
        return {key: filled(part, leaves, row) for key, part in template.items()}
    if kind is list or kind is tuple:
        parts: list[Any] = [filled(part, leaves, row) for part in template]
        return parts if kind is list else tuple(parts)
    if template is None:
        return None
    if _is(template, tuple) and hasattr(template, "_fields"):
        return kind(*(filled(part, leaves, row) for part in template))
    if _is(template, collections.OrderedDict):
        return collections.OrderedDict((key, filled(part, leaves, row)) for key, part in template.items())
    jax: Any = sys.modules["jax"]  # who registered the container has imported it
    numbers, tree = jax.tree_util.tree_flatten(template)
    return tree.unflatten([leaves[number][row] for number in numbers])


# -- the user's source and functions


class Setup:
    """What this process was sent once.

    Attributes:
        stage: what is being done.
        number: of the row or item that it is done to; None: to the batch.
        seconds: in each stage.
    """

    def __init__(self, sent: dict[str, Any]) -> None:
        self._sent = sent
        self._transform: Callable[..., Any] | None = sent["transform"]
        self._collate: Callable[[Any], Any] | None = sent["collate"]
        self._wants_rng: bool = sent["wants_rng"]
        self._template = sent.get("template")
        self._dataset: Any = sent.get("dataset")
        self._told: Any = None
        self._more = 0
        self._failed: BaseException | None = None
        self.stage = "reading"
        self.number: int | None = None
        self.seconds: dict[str, float] = {}
        self._entered = 0.0
        if sent["source"] == "per_worker":
            try:
                self._dataset = sent["make"]()
            except BaseException as error:  # noqa: BLE001 - the first who reads from it is told
                self._failed = error

    def begin(self) -> None:
        self.seconds = dict.fromkeys(("reading", "transforming", "collating", "batching"), 0.0)
        self.stage, self.number = "reading", None
        self._entered = time.perf_counter()

    def enter(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[self.stage] += now - self._entered
        self.stage, self._entered = stage, now

    def close(self) -> None:
        """Close the dataset that was made here."""
        close = getattr(self._dataset, "close", None)
        if self._sent["source"] == "per_worker" and callable(close):
            close()

    # -- items

    def _ready(self, tell: Any) -> Any:
        """The dataset, told its epoch."""
        if self._failed is not None:
            raise self._failed
        dataset = self._dataset
        if self._sent["source"] == "per_worker" and len(dataset) != self._sent["length"]:
            raise RefusedError(
                f"the datasets of {self._sent['name']} differ: the first one has {self._sent['length']} rows, and one that was made later "
                f"has {len(dataset)}"
            )
        if tell is not None and tell != self._told:
            first, self._told = self._told is None, tell
            epoch, run_epoch = tell
            if self._sent["source"] == "per_worker":
                if first:
                    self._more = _set_by_hand(dataset, run_epoch)
                epoch += self._more
            dataset.set_epoch(epoch)
        return dataset

    def read(self, numbers: Sequence[int], tell: Any) -> Iterator[Any]:
        """The items at these rows, each once it is asked for."""
        dataset = self._ready(tell)
        if not self._sent["reads_many"]:
            for number in numbers:
                yield called(operator.getitem, dataset, number)
            return
        rows = list(numbers)
        found = called(dataset.__getitems__, rows)
        name = type(dataset).__qualname__
        if found is None:
            raise RefusedError(f"{name}.__getitems__ returned None, and is to return a list of {len(rows)} examples")
        examples = list(found)
        if len(examples) != len(rows):
            raise RefusedError(f"{name}.__getitems__ was asked for {len(rows)} rows and returned {len(examples)}")
        yield from examples

    def items(self, sent: Any, count: int) -> Iterator[Any]:
        """The items that came with the question."""
        if self._sent["source"] != "arrays":
            yield from sent
            return
        for row in range(count):
            yield filled(self._template, sent, row)

    def made(self, items: Iterator[Any], numbers: Sequence[int], epoch: int) -> Iterator[Any]:
        """The items after `transform`."""
        copies = self._sent["source"] in ("dataset", "per_worker") and (self._transform is not None or self._collate is not None)
        for number in numbers:
            self.enter("reading")
            self.number = number
            item = next(items, END)
            if item is END:
                raise RefusedError(f"an item at row {number} is missing")
            if copies or self._transform is not None:
                self.enter("transforming")
            if copies:
                item = private_copy(item)
            if self._transform is not None:
                item = self._transformed(item, epoch, number)
            self.enter("batching")
            yield item

    def _transformed(self, item: Any, epoch: int, number: int) -> Any:
        assert self._transform is not None
        if self._wants_rng:
            sequence = np.random.SeedSequence(seed_words(self._sent["seed"], epoch, number))
            made = called(self._transform, item, rng=np.random.Generator(np.random.PCG64(sequence)))
        else:
            made = called(self._transform, item)
        if made is None:
            raise ReturnedNoneError("transform")
        return made

    def collated(self, examples: list[Any]) -> Any:
        assert self._collate is not None
        self.enter("collating")
        self.number = None
        made = self._collate(examples)
        if made is None:
            raise ReturnedNoneError("collate")
        self.enter("batching")
        return made


END = object()


def _set_by_hand(dataset: Any, run_epoch: int | None) -> int:
    """By how much the number of a dataset that was made here is to be more than the loader's; see `sources/epochs.py`."""
    if run_epoch is None:
        return 0
    try:
        now = dataset.epoch
    except Exception:  # noqa: BLE001 - the dataset's own code, or no such attribute
        return 0
    return now - run_epoch if type(now) is int and now > 0 else 0


# -- answering


class Server:
    """Answers the parent.

    Args:
        connection: to the parent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Two of each: a question may come before the answer to the one before was looked at, and says which it is to use
        self._memories: tuple[Memory, Memory] = Memory(), Memory()
        self._memory: Memory = self._memories[0]
        self._asked: list[mmap.mmap | None] = [None, None]
        self._new: mmap.mmap | None = None  # that the parent wrote for the question that came last
        self.setup: Setup | None = None

    def receive(self) -> Any:
        """The next message, and with it perhaps new memory that the parent writes; None: there is no more."""
        self._new = None
        data, fds, _, _ = socket.recv_fds(self._connection, HEADER.size, 1)
        for fd in fds:
            self._new = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
            os.close(fd)
        while 0 < len(data) < HEADER.size:
            more = self._connection.recv(HEADER.size - len(data))
            data = data + more if more else b""
        if not data:
            return None
        whole = bytearray(HEADER.unpack(data)[0])
        view = memoryview(whole)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return pickle.loads(whole)

    def send(self, message: Any) -> None:
        new = self._memory.new
        data = pickle.dumps((message, None if new is None else new[1]), protocol=5)
        whole = HEADER.pack(len(data)) + data
        if new is not None:
            whole = memoryview(whole)[socket.send_fds(self._connection, [whole], [new[0]]) :]
            self._memory.forget_new()
        self._connection.sendall(whole)

    def serve(self) -> None:
        """Answer until there are no more questions."""
        while (question := self.receive()) is not None:
            self.send(self._answer(question))
            del question

    def _answer(self, question: Any) -> Any:
        setup = self.setup
        assert setup is not None
        setup.begin()
        try:
            kind, body = self._make(setup, question)
        except BaseException as error:  # noqa: BLE001 - it is sent to who asked
            stage = setup.stage
            setup.enter("reading")
            carried = error.__cause__ if isinstance(error, CarriedError) and error.__cause__ is not None else error
            return "fault", (stage, setup.number, self._fault(carried)), setup.seconds
        setup.enter("reading")
        return kind, body, setup.seconds

    def _make(self, setup: Setup, question: Any) -> tuple[str, Any]:
        numbers, epoch, tell, makes, sent, side = question
        self._memory = self._memories[side]
        if self._new is not None:
            self._asked[side] = self._new
        numbers = numbers if isinstance(numbers, range) else numbers.tolist()
        items = setup.read(numbers, tell) if sent is None else setup.items(self._unpacked(sent, side), len(numbers))
        made = setup.made(items, numbers, epoch)
        if makes == "batch":
            return self._packed("batch", setup.collated(list(made)))
        if makes == "whole":
            return self._packed("batch", next(made))
        return self._stacked(made, len(numbers))

    def _unpacked(self, sent: Any, side: int) -> Any:
        data, where = sent
        # Copies: user code may hold on to an item, and the memory is used again
        return pickle.loads(data, buffers=[bytearray(cast("Any", self._asked[side])[start : start + size]) for start, size in where])

    def _packed(self, kind: str, value: Any) -> tuple[str, Any]:
        data, buffers = dumped_somehow(value)
        return kind, (data, self._written(buffers))

    def _written(self, buffers: list[Any]) -> list[tuple[int, int]]:
        sizes = [buffer.nbytes for buffer in buffers]
        starts, end = places(sizes)
        room = self._memory.room(max(1, end))
        for start, buffer in zip(starts, buffers, strict=True):
            room[start : start + buffer.nbytes] = buffer
        return list(zip(starts, sizes, strict=True))

    def _stacked(self, made: Iterator[Any], count: int) -> tuple[str, Any]:
        stack = Stack(self._memory, count)
        for example in made:
            if not stack.add(example):
                return self._listed(stack, example, made)
        return "stack", (stack.structure, stack.columns)

    def _listed(self, stack: Stack, example: Any, rest: Iterator[Any]) -> tuple[str, Any]:
        """Examples that cannot be stacked here, each as its own pickle, made at once: the next one may overwrite it."""
        data: list[tuple[bytes, int]] = []
        buffers: list[Any] = []

        def add(one: Any) -> None:
            pickled, beside = dumped_somehow(one)
            data.append((pickled, len(beside)))
            buffers.extend(memoryview(bytearray(buffer)) for buffer in beside)

        for before in stack.examples():
            add(before)
        add(example)
        for one in rest:
            add(one)
        return "list", (data, self._written(buffers))

    def _fault(self, error: BaseException) -> tuple[str, Any]:
        if isinstance(error, NoMemoryError):
            return "memory", str(error)
        if isinstance(error, RefusedError):
            return "refused", str(error)
        if isinstance(error, ReturnedNoneError):
            return "none", error.args[0]
        return "raised", fault_of(error)


def fault_of(error: BaseException) -> tuple[bytes | None, str, str]:
    """An exception as it travels: its pickle, if it has one, its type with its text, and the text of its traceback."""
    here = __file__
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == here:  # the user's frames are of interest
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
        text = "".join(lines)
    except Exception:  # noqa: BLE001 - its own __str__ raises
        text = f"{type(error).__qualname__} (its text cannot be made)"
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    with contextlib.suppress(Exception):
        name = f"{name.removeprefix('builtins.')}: {error}"
    try:
        data = by_either(lambda plain: plain.dumps(error, protocol=5))
        if type(pickle.loads(data)) is not type(error):
            data = None
    except BaseException:  # noqa: BLE001 - whatever its pickling does, the text travels
        data = None
    return data, name, text


# -- the program


def _end_with(parent: int) -> None:
    """End this process when the parent has ended, however it did: also while user code runs."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
        while os.getppid() == parent and not poll.poll():
            pass
    except (AttributeError, OSError):
        while os.getppid() == parent:
            time.sleep(1.0)
    os._exit(1)


def prepare(name: str, data: dict[str, Any]) -> None:
    """Give this process the parent's `sys.path`, directory and arguments, and its main module where what is sent needs that."""
    from multiprocessing import process, spawn

    current: Any = process.current_process()
    current._inheriting = True  # a main module that makes a loader when it is imported is told why it must not
    try:
        spawn.prepare({**data, "name": name})
    finally:
        del current._inheriting


def set_up(server: Server, memory: int) -> None:
    """Take what was sent once."""
    hello = server.receive()
    if hello is None:
        sys.exit(0)
    try:
        prepare(hello["name"], hello["prepare"])
        size = os.fstat(memory).st_size
        shared = memoryview(mmap.mmap(memory, size, access=mmap.ACCESS_COPY))  # who writes to an array of the source gets a copy
        os.close(memory)
        table, data = (shared[start : start + count] for start, count in (hello["table"], hello["data"]))
        buffers = [shared[start : start + count] for start, count in pickle.loads(table)]
        server.setup = Setup(pickle.loads(data, buffers=buffers))
    except BaseException as error:  # noqa: BLE001 - it is sent to who asked
        server.send(("failed", fault_of(error), {}))
        sys.exit(0)
    server.send(("ready", None, {}))


def main() -> None:
    """Run the process: arguments are the socket, the memory, and the parent's number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    connection, memory, parent = map(int, sys.argv[1:4])
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with socket.socket(fileno=connection) as ours:
        server = Server(ours)
        try:
            set_up(server, memory)
            server.serve()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the parent has closed the connection
    if server.setup is not None:
        server.setup.close()


if __name__ == "__main__":
    main()
