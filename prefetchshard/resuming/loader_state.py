"""The state of a run as a value: to save, to check against a loader, and to resume from.

An encoded state is `PFSt`, eight bytes of BLAKE2b over the rest, and one MessagePack array that begins with the version. Decoding runs
no code from the file, and any bytes give either a state or a `StateError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import Any, Final, Self, cast

import msgspec
import numpy as np

from prefetchshard.base.codec import is_count, pack_plain, read_safely, shown, type_name, unpack_plain
from prefetchshard.base.errors import StateError
from prefetchshard.base.position import StartPoint

VERSION: Final = 2
"""The format version that this library writes; it reads version 1 too."""

_MAGIC: Final = b"PFSt"
_HEAD_BYTES: Final = len(_MAGIC) + 8


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that determines the order of rows. A state resumes only a loader with the same fingerprint.

    Args:
        seed: at most 256 bits.
        shuffle: whether the rows of an epoch are permuted.
        length: rows of the source (batches, without `batch_size`); None if unknown, which matches any length.
        batch_size: global rows per step; None if the source makes the batches.
        remainder: "drop", "keep", "error" or "pad".
        kind: "random access" (arrays and datasets: the same rows have the same order) or "iterator".

    Raises:
        StateError: a value has the wrong type or is out of range.

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
        _want("length", length, length is None or is_count(length), "None or a count")
        _want("batch_size", batch_size, batch_size is None or (is_count(batch_size) and batch_size > 0), "None or at least 1")
        _want("remainder", self.remainder, self.remainder in ("drop", "keep", "error", "pad"), "'drop', 'keep', 'error' or 'pad'")
        _want("kind", kind, type(kind) is str and 0 < len(kind) <= 64 and kind.isprintable(), "a short printable text")


class LoaderState(StartPoint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place in a run after the last batch delivered to the consumer, regardless of prefetched batches: a start point and a fingerprint.

    Args:
        version: version of the format.
        fingerprint: determines the order of rows.
        run, run_epoch, epoch, rows, batches, step, last_rows, batch_rows: see `StartPoint`.
        resumes_by, snapshot, since_snapshot, sample: see `StartPoint`.

    Raises:
        StateError: a value has the wrong type or is out of range.

    Thread safety: immutable.

    Example:
        rows = np.arange(64, dtype=np.float32)
        batches = iter(ps.Loader(rows, P("data"), batch_size=16))
        next(batches)
        state = ps.LoaderState.decode(batches.state().encode())  # also: save(path) and load(path)
        assert len(list(ps.Loader(rows, P("data"), batch_size=16, state=state))) == 3
    """

    version: int = VERSION
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        _check_version(self.version)
        for name in ("run", "run_epoch", "epoch", "rows", "batches", "step", "last_rows", "since_snapshot"):
            value: object = getattr(self, name)
            _want(name, value, is_count(value), "a count from 0 to 2**63 - 1")
        snapshot, sample, batch_rows = self.snapshot, self.sample, self.batch_rows
        _want("batch_rows", batch_rows, batch_rows is None or is_count(batch_rows), "None or a count")
        _want("resumes_by", self.resumes_by, self.resumes_by in ("index", "snapshot", "replay"), "'index', 'snapshot' or 'replay'")
        _want("snapshot", snapshot, snapshot is None or type(snapshot) is bytes, "None or bytes from pack_snapshot")
        _want("sample", sample, sample is None or (type(sample) is bytes and len(sample) <= 64), "None or at most 64 bytes")
        _want("fingerprint", self.fingerprint, type(self.fingerprint) is Fingerprint, "a Fingerprint")

    def encode(self) -> bytes:
        """Returns the state as bytes, the same for equal states."""
        start = [getattr(self, name) for name in StartPoint.__struct_fields__]
        return _seal(pack_plain([VERSION, start, list(msgspec.structs.astuple(self.fingerprint))]))

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Self:
        """Reads what `encode` wrote.

        Raises:
            StateError: the bytes are damaged, no state, or of a newer version.
        """
        if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise StateError(f"a state is read from bytes, not from {type_name(data)}")
        values = read_safely(unpack_plain, _unseal(read_safely(bytes, data)))
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
        """Returns the complete state as one line of JSON, with bytes in base64."""
        return msgspec.json.format(msgspec.json.encode(self), indent=0).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what `to_json` wrote; raises StateError as `decode` does, and for unknown or missing fields."""
        fields = read_safely(msgspec.json.decode, text)
        if type(fields) is not dict:
            raise StateError("a state in JSON is an object")
        fields = cast("dict[str, Any]", fields)
        _check_version(fields.get("version", VERSION))
        # Without this check a misspelt or missing field would get its default, and the run would silently start over.
        if missing := set(cls.__struct_fields__) - set(fields):
            raise StateError(f"the state lacks {', '.join(sorted(missing))}")
        return cls._from_fields(fields)

    @classmethod
    def _from_fields(cls, fields: dict[str, Any], *, builtin_types: tuple[type, ...] = ()) -> Self:
        if fields.get("version") == 1:  # its `sample` is a hash of the placed batch, not of the pulled items
            fields = {**fields, "version": VERSION, "sample": None}
        return read_safely(lambda: msgspec.convert(fields, cls, builtin_types=builtin_types))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file atomically: after a crash the file holds the complete old state or the complete new one.

        Raises:
            OSError: the file cannot be written; the old one is then unchanged.
        """
        # If the path is a symbolic link, replace its target, not the link.
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
            StateError: the file is damaged, no state, or of a newer version; the message names the file.
            OSError: the file does not exist or cannot be read.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            return cls.decode(data)
        except StateError as error:
            raise StateError(f"{os.fspath(path)}: {error}") from error

    def rebatch(self, batch_size: int) -> Self:
        """Returns a state that resumes with another batch size, at the next row.

        `rows`, `batches` and `step` still count what was delivered; the fields about batches of the old size (`sample`, `batch_rows`)
        are cleared.

        Raises:
            StateError: the place is counted in batches or known only to the source, or `batch_size` is no positive integer.
        """
        if self.fingerprint.batch_size is None:
            raise StateError("rebatch: the source makes the batches, so their size is not the loader's to change")
        if self.resumes_by == "snapshot":
            raise StateError("rebatch: the place is in the source's own state, which was taken between batches of the old size")
        if isinstance(batch_size, np.integer):
            batch_size = int(batch_size)
        _want("batch_size", batch_size, is_count(batch_size) and batch_size > 0, "an integer, at least 1,")
        fingerprint = msgspec.structs.replace(self.fingerprint, batch_size=batch_size)
        return msgspec.structs.replace(self, fingerprint=fingerprint, sample=None, batch_rows=None)

    def unchecked(self) -> Self:
        """Returns the state without its `sample`, so that a replay does not check whether the source is the same.

        For sources that differ on purpose each time they are read, such as one with unseeded augmentation.
        """
        return msgspec.structs.replace(self, sample=None)

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"LoaderState({', '.join(f'{name}={_in_short(value)}' for name, value in fields)})"

    def check(self, have: Fingerprint) -> None:
        """Compares the state's fingerprint with a loader's.

        Raises:
            StateError: they differ; the message names each field that differs, with both values.
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


def _in_short(value: object) -> str:
    """Its repr; of a source's own state, which may have megabytes, the size."""
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) and len(value) > 64 else repr(value)


def _want(name: str, value: object, holds: bool, what: str) -> None:
    if not holds:
        raise StateError(f"{name}={shown(value)} ({type_name(value)}): {what} is needed")


def _check_version(version: object) -> None:
    if type(version) is int and version > VERSION:
        raise StateError(f"written by a newer prefetchshard: version {shown(version)}, this one reads up to {VERSION}")
    _want("version", version, type(version) is int and version > 0, f"1 to {VERSION}")


def _named(kind: type[msgspec.Struct], values: object) -> dict[str, Any]:
    names = kind.__struct_fields__
    if type(values) is not list or len(cast("list[Any]", values)) != len(names):
        raise StateError(f"the state is damaged: its {kind.__name__} does not have {len(names)} values")
    return dict(zip(names, cast("list[Any]", values), strict=True))


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
    # Makes the rename durable. Not every platform and file system supports it; the file itself is complete either way.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
