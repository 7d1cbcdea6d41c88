"""Sources and functions for tests of worker processes, which import this module: so neither JAX nor the library is imported here."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Pair(NamedTuple):
    x: Any
    rest: Any


class Rows:
    """A dataset of examples of all kinds of leaves.

    Args:
        length: rows.
        form: which containers and leaves.
    """

    def __init__(self, length: int = 40, form: str = "dict") -> None:
        self.form = form
        self.values = np.random.default_rng(3).standard_normal((length, 3, 2)).astype(np.float32)
        self.buffer = np.zeros((3, 2), np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        x = self.values[row]
        match self.form:
            case "dict":
                return {"x": x, "row": np.int32(row), "flag": row % 2 == 0, "n": row, "part": {"y": x[:, ::-1]}, "none": None}
            case "tuple":
                return (x, [x * 2, np.float32(row)], float(row))
            case "pair":
                return Pair(x, {"row": np.int64(row)})
            case "array":
                return x
            case "numbers":
                return {"ids": [row, row + 1, row + 2], "x": x}
            case "mixed":  # as the first one, in another order, of another byte order, an array for a scalar
                return [
                    {"x": x, "row": np.int32(row)},
                    {"row": np.int32(row), "x": x},
                    {"x": x.astype(">f4"), "row": np.int32(row)},
                    {"x": x, "row": np.array(row, np.int32)},
                ][(row // 2) % 4]
            case "row and set" | "row and long text":  # pickled; the long ones do not fit into a socket's buffer
                return {"row": np.int32(row), "text": {f"{row}" * (2000 if "long" in self.form else 1)}}
            case "text":
                return {"x": x, "name": f"row {row}", "more": {"a": x, "n": row}, "odd": {row}}
            case "fortran":
                return {"x": np.asfortranarray(x), "big": x.astype(">f4"), "half": x.astype(np.float16)}
            case _:  # one buffer for all
                self.buffer[:] = x
                return {"x": self.buffer, "row": np.int32(row)}


class Gated:
    """A dataset whose rows are there in the process that made it, and in others as soon as a file is."""

    def __init__(self, length: int, *, path: str) -> None:
        self.length = length
        self.path = path
        self.pid = os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> np.ndarray:
        while os.getpid() != self.pid and not os.path.exists(self.path):
            time.sleep(0.001)
        return np.full(2, row, np.float32)


class Many(Rows):
    """As `Rows`, asked for many at once."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Epochs(Rows):
    """Says the epoch that it was told in each example."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, row: int) -> Any:
        return {"row": np.int32(row), "epoch": np.int32(self.epoch)}


class Closed(Rows):
    """Writes to a file that it was closed.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(24)
        self.path = path

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


class Where(Rows):
    """Says in which process it is read, and what that has imported."""

    def __getitem__(self, row: int) -> Any:
        owns = self.values.flags.owndata
        return {"pid": np.int32(os.getpid()), "jax": np.int32("jax" in sys.modules), "owns": np.int32(owns), "row": np.int32(row)}


class Mapped:
    """Rows in a memory-mapped file."""

    def __init__(self, array: np.memmap) -> None:
        self.whole = array
        self.part = array[10:, ::2]
        self.plain = np.asarray(array)[5:]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        maps = [isinstance(one.base if type(one) is np.ndarray else one, np.memmap) for one in (self.whole, self.part, self.plain)]
        return {"a": self.whole[row], "b": self.part[row], "c": self.plain[row], "maps": np.int32(sum(maps))}


class NotReady:
    """Takes for ever to be unpickled."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Any:
        return {"row": np.int32(row)}

    def __setstate__(self, state: Any) -> None:
        time.sleep(3600)

    def __getstate__(self) -> Any:
        return {"a": 1}


class Unpickles:
    """Cannot be unpickled."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Any:
        return {"row": np.int32(row)}

    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        raise ValueError("no such data here")


class Exits(Unpickles):
    """Ends the process that unpickles it."""

    def __setstate__(self, state: Any) -> None:
        os._exit(4)


class TooMany(Many):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in [*rows, 0]]


class Holds:
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.inner = {"file": sys.stdin, "lock": __import__("threading").Lock()}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        return np.float32(row)


def pulled(form: str = "dict", length: int = 40) -> Iterator[Any]:
    rows = Rows(length, form)
    for row in range(length):
        yield rows[row]


def batches(count: int = 5) -> Iterator[Any]:
    for i in range(count):
        yield {"x": np.full((8, 3), i, np.float32), "name": np.full(8, f"batch {i}", object)}


# -- functions


class Odd(Exception):
    """With an argument that its text does not have, and an attribute."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return Odd, (self.code,)


class NotPickled(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class NotUnpickled(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def double(example: Any) -> Any:
    """Changes what it gets."""
    example["x"] *= 2
    return example


def with_rng(example: Any, rng: np.random.Generator) -> Any:
    return {**example, "r": rng.standard_normal(4).astype(np.float32)}


def ragged(example: Any) -> Any:
    return {"x": example["x"].reshape(-1)[: 1 + int(example["row"]) % 5]}


def pad(examples: list[Any]) -> Any:
    most = max(len(example["x"]) for example in examples)
    x = np.zeros((len(examples), most), np.float32)
    for row, example in zip(x, examples, strict=True):
        row[: len(example["x"])] = example["x"]
    return {"x": x, "length": np.array([len(example["x"]) for example in examples], np.int32)}


def with_names(examples: list[Any]) -> Any:
    return {"x": np.stack([example["x"] for example in examples]), "notes": {"all": np.arange(1000.0) + examples[0]["n"]}}


def negate(batch: Any) -> Any:
    return {**batch, "x": -batch["x"]}


def last_leaf_differs(example: Any) -> Any:
    return {**example, "x": example["x"][:1]} if example["row"] == 13 else example


def fails(example: Any) -> Any:
    if example["row"] == 21:
        deeper(example)
    return example


def deeper(example: Any) -> None:
    raise Odd(7)


def fails_unpickled(example: Any) -> Any:
    if example["row"] == 21:
        raise NotPickled("a secret")
    return example


def fails_unloadable(example: Any) -> Any:
    if example["row"] == 21:
        raise NotUnpickled(1, 2)
    return example


def stops(example: Any) -> Any:
    if example["row"] == 21:
        raise StopIteration
    return example


def leaves_python(example: Any) -> Any:
    if example["row"] == 21:
        sys.exit(5)
    return example


def forgets(example: Any) -> Any:
    return None if example["row"] == 21 else example


def exits(example: Any) -> Any:
    if example["row"] == 21:
        os._exit(3)
    return example


def is_killed(example: Any) -> Any:
    if example["row"] == 21:
        os.kill(os.getpid(), signal.SIGKILL)
    return example


def hangs(example: Any) -> Any:
    if example["row"] == 21:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    return example


def has_no_memory(example: Any) -> Any:
    """What comes next needs shared memory that there is not."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return example


def crashes(example: Any) -> Any:
    ctypes.string_at(0)
    return example


def late_exit(example: Any) -> Any:
    if example["n"] == 200:
        os._exit(3)
    return example


def late_raise(example: Any) -> Any:
    if example["n"] == 200:
        raise ValueError("this one")
    return example


# -- faults at random moments


def takes_a_while(example: Any) -> Any:
    time.sleep(0.0003)
    return example


def _strikes() -> bool:
    """Whether it is time. Never in the process of the test."""
    time.sleep(0.0003)
    return "jax" not in sys.modules and os.urandom(1)[0] < 3


def exits_at_random(example: Any) -> Any:
    if _strikes():
        os._exit(3)
    return example


def raises_at_random(example: Any) -> Any:
    if _strikes():
        raise NotPickled("a secret")
    return example


def no_memory_at_random(example: Any) -> Any:
    """What comes next needs more shared memory than there is."""
    if _strikes():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return {**example, "more": np.zeros(1 << 20, np.float32)}
    return example
