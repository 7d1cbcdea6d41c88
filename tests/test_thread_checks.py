"""Datasets that several threads must not read at once: a loader and `check_source` find them, and `per_worker` and `workers=1` read them
right."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchshard as ps
from prefetchshard.reading import first_reads, interleaving
from prefetchshard.testing import check_source
from support import HANG_SECONDS, run_python, wait_until

ROWS, WIDTH = 512, 4
TABLE = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.bin"
    TABLE.tofile(path)
    return path


class Base:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        pass

    def __len__(self) -> int:
        return ROWS


class Seeks(Base):
    """Seeks and reads one file handle."""

    def begin(self) -> None:
        self.file: Any = io.BytesIO(self.path.read_bytes())

    def __getitem__(self, row: int) -> Any:
        self.file.seek(row * WIDTH * 4)
        return np.frombuffer(self.file.read(WIDTH * 4), np.int32)


class OpensLate(Seeks):
    def begin(self) -> None:
        self.file = None

    def __getitem__(self, row: int) -> Any:
        if self.file is None:
            super().begin()
        return super().__getitem__(row)


class InOneLine(Seeks):
    def __getitem__(self, row: int) -> Any:
        return np.frombuffer((self.file.seek(row * WIDTH * 4), self.file.read(WIDTH * 4))[1], np.int32)


class Deeper(Base):
    """As torch's Subset and ConcatDataset hold other datasets."""

    def begin(self) -> None:
        self.parts = [{"part": Seeks(self.path)}]

    def __getitem__(self, row: int) -> Any:
        return self.parts[0]["part"][row]


class Many(Seeks):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Slots:
    __slots__ = ("seeks",)

    def __init__(self, path: Path) -> None:
        self.seeks = Seeks(path)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.seeks[row]


class OneBuffer(Base):
    """Returns one reused buffer."""

    def begin(self) -> None:
        self.buffer = np.empty(WIDTH, np.int32)

    def __getitem__(self, row: int) -> Any:
        np.copyto(self.buffer, TABLE[row])
        return {"x": self.buffer}


class OneDict(Base):
    """Returns one dict again and again, with an array of its own in it."""

    def begin(self) -> None:
        self.example = dict[str, Any]()

    def __getitem__(self, row: int) -> Any:
        self.example["x"] = TABLE[row].copy()
        return self.example


class Place(Base):
    """Keeps the row in an attribute."""

    def begin(self) -> None:
        self.row = 0

    def load(self) -> Any:
        return TABLE[self.row]

    def __getitem__(self, row: int) -> Any:
        self.row = row
        return self.load()


class Piece(Base):
    """Keeps the last piece that was loaded, and says so too early."""

    def begin(self) -> None:
        self.number, self.piece = -1, TABLE[:0]

    def load(self) -> Any:
        return TABLE[self.number * 32 : (self.number + 1) * 32].copy()

    def __getitem__(self, row: int) -> Any:
        if self.number != row // 32:
            self.number = row // 32
            self.piece = self.load()
        return self.piece[row % 32].copy()


class Raises(Seeks):
    """Where two threads meet it raises."""

    def __getitem__(self, row: int) -> Any:
        self.file.seek(row * WIDTH * 4)
        found = np.frombuffer(self.file.read(WIDTH * 4), np.int32)
        if found[0] != row * WIDTH:
            raise EOFError("a damaged record")
        return found


HANDLE: Any = io.BytesIO(TABLE.tobytes())


class Global(Base):
    def __getitem__(self, row: int) -> Any:
        HANDLE.seek(row * WIDTH * 4)
        return np.frombuffer(HANDLE.read(WIDTH * 4), np.int32)


UNSAFE: dict[str, Callable[[Path], Any]] = {
    "seeks": Seeks,
    "opens late": OpensLate,
    "in one line": InOneLine,
    "deeper": Deeper,
    "many": Many,
    "slots": Slots,
    "one buffer": OneBuffer,
    "one dict": OneDict,
    "place": Place,
    "piece": Piece,
    "raises": Raises,
    "global": Global,
}


def read(source: Any, **options: Any) -> list[Any]:
    return [batch["x"] if isinstance(batch, dict) else batch for batch in ps.Loader(source, ps.HOST, batch_size=16, **options)]


@pytest.mark.parametrize("name", UNSAFE)
def test_the_ways_out_give_every_row(name: str, path: Path) -> None:
    make = UNSAFE[name]
    ways: list[tuple[Any, int]] = [(make(path), 1)] + ([(ps.per_worker(lambda: make(path)), 3)] if name != "global" else [])
    for source, workers in ways:
        assert np.array_equal(np.concatenate(read(source, workers=workers)), TABLE)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does other things too, a thread may wait long for its turn; then less is found than could be."""
    monkeypatch.setattr(interleaving, "TURN_SECONDS", 0.25)
    monkeypatch.setattr(interleaving, "BEGIN_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(interleaving, "SECONDS", HANG_SECONDS)
    monkeypatch.setattr(first_reads, "PATIENCE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(first_reads, "TRY_SECONDS", HANG_SECONDS)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 4, "shuffle": True}, {"workers": 3, "collate": list}], ids=str)
@pytest.mark.parametrize("name", UNSAFE)
def test_a_loader_finds_them_before_it_gives_a_batch(name: str, options: dict[str, Any], path: Path) -> None:
    source = UNSAFE[name](path)
    loader = ps.Loader(source, ps.HOST, batch_size=16, **options)
    for _ in range(2):
        run = iter(loader)
        with pytest.raises(ps.SourceError, match=rf"{type(source).__name__} must not be read by several threads") as caught:
            next(run)
        assert "ps.per_worker(make_dataset), or read it with workers=1" in str(caught.value)
        run.close()


@pytest.mark.usefixtures("unhurried")
def test_datasets_of_batches_are_found_too(path: Path) -> None:
    got: list[Any] = []
    with pytest.raises(ps.SourceError, match="Seeks must not be read by several threads"):
        got.extend(ps.Loader(Seeks(path), ps.HOST, workers=2))
    assert len(got) < 2, "the second read is held until it is known"


@pytest.mark.usefixtures("unhurried")
@pytest.mark.ecosystem
def test_one_tensor_for_all_rows_is_found(path: Path) -> None:
    import torch

    class OneTensor(Base):
        def begin(self) -> None:
            self.tensor = torch.zeros(WIDTH, dtype=torch.int32)

        def __getitem__(self, row: int) -> Any:
            self.tensor[:] = torch.from_numpy(TABLE[row])
            return {"x": self.tensor}

    with pytest.raises(ps.SourceError, match="OneTensor must not be read by several threads"):
        read(OneTensor(path), workers=2)


class GateOfTheImpatient:
    """The patience of who waits ends as soon as rows are read in turns, and not before, however long the first reads take."""

    def __init__(self, reads: Any) -> None:
        self.reads, self.lock = reads, threading.Lock()

    def acquire(self, timeout: float) -> bool:
        if timeout != first_reads.PATIENCE_SECONDS:
            return self.lock.acquire(timeout=timeout)
        while not self.lock.acquire(timeout=0.01):
            if self.reads._in_turns:
                return False
        return True

    def release(self) -> None:
        self.lock.release()


@pytest.mark.usefixtures("unhurried")
def test_slow_ones_are_found_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows are read again and again, the other workers wait longer."""
    begin = first_reads.FirstReads.__init__

    def begin_at_the_gate(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._gate = GateOfTheImpatient(self)

    monkeypatch.setattr(first_reads.FirstReads, "__init__", begin_at_the_gate)

    class Slow(Seeks):
        def __getitem__(self, row: int) -> Any:
            self.file.seek(row * WIDTH * 4)
            time.sleep(0.004)
            return np.frombuffer(self.file.read(WIDTH * 4), np.int32)

    with pytest.raises(ps.SourceError, match="Slow must not be read by several threads"):
        next(iter(ps.Loader(Slow(path), ps.HOST, batch_size=16, workers=4)))


class GateOfTheLate:
    """Lets who came first through, again and again, and the other one once the dataset was found out."""

    def __init__(self, reads: Any) -> None:
        self.reads, self.lock, self.both, self.came = reads, threading.Lock(), threading.Barrier(2), list[int]()

    def acquire(self, timeout: float) -> bool:
        ident = threading.get_ident()
        if ident not in self.came:
            self.came.append(ident)
            self.both.wait(HANG_SECONDS)
        if ident != self.came[0]:
            wait_until(lambda: self.reads._source.unsafe)
        return self.lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.lock.release()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("kind", [Seeks, Many])
def test_who_comes_late_to_the_first_batch_does_not_read_it(kind: type[Base], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker reads its part of the first batch and of the second, and there it is found out: the first one is not given either."""
    begin = first_reads.FirstReads.__init__

    def begin_at_the_gate(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._gate = GateOfTheLate(self)

    monkeypatch.setattr(first_reads.FirstReads, "__init__", begin_at_the_gate)
    with pytest.raises(ps.SourceError, match=f"{kind.__name__} must not be read by several threads"):
        next(iter(ps.Loader(kind(path), ps.HOST, batch_size=16, workers=2)))


class Locked(Seeks):
    def begin(self) -> None:
        super().begin()
        self.lock = threading.Lock()

    def __getitem__(self, row: int) -> Any:
        with self.lock:
            return super().__getitem__(row)


class PerThread(Seeks):
    def begin(self) -> None:
        super().begin()
        self.local = threading.local()

    def __getitem__(self, row: int) -> Any:
        if not hasattr(self.local, "seeks"):
            self.local.seeks = Seeks(self.path)
            self.local.buffer = np.empty(WIDTH, np.int32)
        self.local.buffer[:] = self.local.seeks[row]
        return self.local.buffer


class Mapped(Base):
    def begin(self) -> None:
        self.mapped = np.memmap(self.path, np.int32, "r").reshape(ROWS, WIDTH)
        self.file = self.path.open("rb")
        self.file.close()

    def __getitem__(self, row: int) -> Any:
        return self.mapped[row]


class Counts(Base):
    """Caches, counts and logs what it is asked for; that is no reason to read it more often."""

    def begin(self) -> None:
        self.count, self.cache, self.log = 0, dict[int, Any](), list[int]()
        self.lock = threading.Lock()

    def __getitem__(self, row: int) -> Any:
        with self.lock:
            self.count += 1
        self.log.append(row)
        return self.cache.setdefault(row, TABLE[row])


@pytest.mark.parametrize("kind", [Locked, PerThread, Mapped, Counts])
def test_a_dataset_that_is_safe_is_read(kind: type[Base], path: Path) -> None:
    source = kind(path)
    assert np.array_equal(np.concatenate(read(source, workers=4)), TABLE)
    if isinstance(source, Counts):
        assert sorted(source.log) == [*range(ROWS)]
        assert source.count == ROWS


class Awaits(Base):
    """The first row of a thread waits for that of another one, so that it is not to be read alone for ever."""

    def begin(self) -> None:
        self.both = threading.Barrier(2)
        self.local = threading.local()

    def __getitem__(self, row: int) -> Any:
        if not hasattr(self.local, "has_met"):
            self.local.has_met = self.both.wait(60)
        return TABLE[row]


def test_rows_may_wait_for_each_other(path: Path) -> None:
    assert np.array_equal(np.concatenate(read(Awaits(path), workers=2)), TABLE)


def test_rows_that_are_not_due_yet_do_not_hold_up_the_first_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks suspicious, as it seeks, and the rows that are tried then wait for the batches before them."""
    monkeypatch.setattr(first_reads, "TRY_SECONDS", 0.2)
    due = threading.Event()

    class Arrives(PerThread):
        def __getitem__(self, row: int) -> Any:
            assert row < 16 or due.wait(60)
            return super().__getitem__(row)

    got: list[Any] = []
    for batch in ps.Loader(Arrives(path), ps.HOST, batch_size=16, workers=2):
        got.append(batch)
        due.set()
    assert np.array_equal(np.concatenate(got), TABLE)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("options", [{"read_ahead": 1}, {"read_ahead": 3}, {}], ids=str)
@pytest.mark.parametrize("kind", [Seeks, OneBuffer, Place, Locked])
def test_the_bound_on_reading_ahead_is_kept(kind: type[Base], options: dict[str, Any], path: Path) -> None:
    """What is read again are rows of batches that may be read."""
    asked: list[int] = []

    class Asked(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, row: int) -> Any:
            asked.append(row)
            return super().__getitem__(row)

    with ps.Loader(Counts(path), ps.HOST, batch_size=16, workers=2, **options) as loader:
        ahead = loader.spec().ahead
    run = iter(ps.Loader(Asked(path), ps.HOST, batch_size=16, workers=2, **options))
    if kind is Locked:
        assert np.array_equal(next(run), TABLE[:16])
    else:
        with pytest.raises(ps.SourceError, match="must not be read by several threads"):
            next(run)
    assert len(asked) > 8
    assert max(asked) < 16 * (1 + ahead) < ROWS
    run.close()


def test_an_error_in_the_first_read_is_the_datasets_own(path: Path) -> None:
    """Of the two workers, each of which has half of the first batch, whoever comes first."""

    class Fails(Seeks):
        def __getitem__(self, row: int) -> Any:
            raise OSError(f"row {row} is damaged")

    with pytest.raises(OSError, match="row (0|8) is damaged"):
        read(Fails(path), workers=2)


@pytest.mark.usefixtures("unhurried")
def test_it_is_found_out_once(path: Path) -> None:
    """A dataset that looks as if it were not safe is read more often in the first run alone."""
    asked: list[int] = []

    class Remembers(Locked):
        def __getitem__(self, row: int) -> Any:
            asked.append(row)
            return super().__getitem__(row)

    loader = ps.Loader(Remembers(path), ps.HOST, batch_size=16, workers=2)
    reads: list[int] = []
    for _ in range(3):
        assert np.array_equal(np.concatenate(list(loader)), TABLE)
        reads.append(len(asked))
        asked.clear()
    assert ROWS < reads[0] < ROWS + 20
    assert reads[1:] == [ROWS, ROWS]


def test_a_profile_function_of_the_users_stays(path: Path) -> None:
    """What looks for unsafe datasets does not take its place, not even for a row."""

    def users(frame: Any, event: str, arg: Any) -> None:
        pass

    found: list[Any] = []

    class Looks(Locked):
        def __getitem__(self, row: int) -> Any:
            found.append(sys.getprofile())
            return TABLE[row]

    threading.setprofile(users)
    try:
        read(Looks(path), workers=2)
    finally:
        threading.setprofile(None)
    assert found == [users] * ROWS


class Random(Seeks):
    """Its examples are random; what it reads from its file is not in them."""

    chance = 1.0

    def begin(self) -> None:
        super().begin()
        self.random = np.random.default_rng(0)
        self.lock = threading.Lock()

    def __getitem__(self, row: int) -> Any:
        with self.lock:
            return TABLE[row] + (self.random.random(WIDTH) < self.chance) * self.random.integers(1, 9, WIDTH)


@pytest.mark.parametrize("chance", [1.0, 0.5, 0.1, 0.01])
def test_random_examples_are_no_reason_for_an_error(chance: float, path: Path) -> None:
    for _ in range(5):
        source = Random(path)
        source.chance = chance
        assert len(read(source, workers=2)) == ROWS // 16


def test_which_thread_reads_may_be_in_the_example(path: Path) -> None:
    class Whose(Seeks):
        def __getitem__(self, row: int) -> Any:
            return threading.get_ident()

    assert len(read(Whose(path), workers=2)) == ROWS // 16


# -- the parts


def test_turns_end_where_a_thread_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two rows waits for the other one to be read: taking turns alone would never end."""
    monkeypatch.setattr(interleaving, "TURN_SECONDS", 0.001)
    lock = threading.Lock()

    def locked(row: int) -> int:
        with lock:
            return sum(abs(i) for i in range(50)) + row

    before = sys.getprofile()
    assert interleaving.Interleaving(locked).find(range(100)) is None
    assert not any(thread.name == interleaving.PROBE_THREAD for thread in threading.enumerate())
    assert sys.getprofile() is before


@pytest.mark.parametrize("length", range(12))
def test_pairs_are_rows_of_the_dataset(length: int) -> None:
    def rows() -> Iterator[int]:
        for pair in interleaving.pairs_of(length):
            yield from pair
            for other in interleaving.more_pairs(pair, length):
                yield from other

    assert all(0 <= row < length for row in rows())
    assert all(a < b for a, b in interleaving.pairs_of(length))


@pytest.mark.usefixtures("unhurried")
def test_check_source_finds_them_always(path: Path) -> None:
    for make in UNSAFE.values():
        with pytest.raises(AssertionError, match="asked by . threads"):
            check_source(lambda make=make: make(path), most=50)


def test_a_collection_where_the_turns_end_does_no_harm() -> None:
    """CPython calls the profile function without holding it; a collection right before may run Python code, in which it unset itself."""
    program = """
        import gc
        from prefetchshard.reading.interleaving import Interleaving

        def look(phase, info):
            return [phase]

        def read(row, depth=None):
            depth = 40 + 40 * (row % 2) if depth is None else depth  # one thread ends before the other
            kept = [[depth] for _ in ()] if depth % 3 else [depth]  # a collection now here, now there
            return row if depth == 0 else read(row, depth - 1)

        gc.callbacks.append(look)
        gc.set_threshold(1, 10, 10)
        for _ in range(20):
            assert Interleaving(read).find(range(64)) is None
        print("done")
    """
    result = run_python(program, env={"PYTHONMALLOC": "debug"})
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr
