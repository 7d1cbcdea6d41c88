"""Finds out whether a dataset may be read by several threads at once: two threads read two rows in turns, and the rows are compared with
what they are when the same threads read one after the other.

The threads take turns at every call that the dataset makes and at every return, which is where the interpreter can switch between
threads. `sys.setprofile` tells of them, and leaves `sys.settrace` to debuggers and to the measuring of coverage.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from prefetchshard.base.jax_context import JaxContext
from prefetchshard.leaves.copying import private_copy
from prefetchshard.reading.comparing import difference

PROBE_THREAD = "prefetchshard-probe"
TURN_SECONDS = 0.005
"""Who waits longer for its turn goes on: the other thread waits for a lock that this one holds, or for a file."""
BEGIN_SECONDS = 1.0
"""Who waits longer for the other thread to begin goes on alone."""
MOST_TURNS = 2000
"""Of one thread in one read; what comes after them is not taken in turns."""
SECONDS = 0.5
"""No new pair of rows is tried after this time."""
QUIET_READS, MORE_PAIRS, WRONG_PAIRS = 32, 6, 5
"""Rows that came out wrong are read again so often, alone, and so many more pairs in turns. Unless they are the same each time, and so many
of the pairs come out wrong, the examples are taken for random ones."""


class Finding(msgspec.Struct, frozen=True):
    """A row that came out wrong.

    Attributes:
        row: its number.
        other: the row that the other thread read.
        what: how it differs, or what was raised.
        error: what was raised; None if nothing was.
    """

    row: int
    other: int
    what: str
    error: BaseException | None


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Which of so many rows two threads read at once: some far from each other, and neighbours, which may share a piece of a file."""
    pairs = [(0, count // 2), (count // 4, count - 1), (count // 2, count // 2 + 1), (count // 3, 2 * count // 3)]
    return [(a, b) for a, b in dict.fromkeys(pairs) if 0 <= a < b < count]


def more_pairs(pair: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Pairs with the same distance elsewhere: a piece of a file that both rows need must not be there already."""
    span = pair[1] - pair[0]
    firsts = [(pair[0] + i * (count // (MORE_PAIRS + 1) + 1)) % max(1, count - span) for i in range(1, MORE_PAIRS + 1)]
    return [(first, first + span) for first in firsts]


class Interleaving:
    """Reads pairs of rows in two threads: this one, and another that is started for each pair.

    Args:
        read: gives the example at a row.
    """

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read
        self._context = JaxContext()
        self._stopped = False

    def stop(self) -> None:
        """Read no more than what is being read; nothing is found then."""
        self._stopped = True

    def find(self, rows: Sequence[int], most_pairs: int | None = None) -> Finding | None:
        """The first row that comes out wrong; None if none does, or if the examples are random.

        Args:
            rows: that may be read, in ascending order.
            most_pairs: that are tried; None: all of `pairs_of`.
        """
        deadline = time.monotonic() + SECONDS
        for places in pairs_of(len(rows))[:most_pairs]:
            found = self._try(places, rows)
            if self._stopped:
                return None
            if found is not None or time.monotonic() > deadline:
                return found
        return None

    def _try(self, places: tuple[int, int], rows: Sequence[int]) -> Finding | None:
        pair = rows[places[0]], rows[places[1]]
        together, alone = self._together(pair), self._apart(pair)
        found = _compare(pair, together, alone)
        if found is None:
            return None
        for _ in range(QUIET_READS):
            if self._stopped or _compare(pair, self._apart(pair), alone) is not None:
                return None
        wrong = 0
        for first, second in more_pairs(places, len(rows)):
            if self._stopped:
                return None
            other = rows[first], rows[second]
            wrong += _compare(other, self._together(other), self._apart(other)) is not None
        return found if wrong >= WRONG_PAIRS else None

    def _apart(self, pair: tuple[int, int]) -> list[_Answer]:
        """Both rows, each by its own thread, one after the other."""
        answers = [_Answer(), _Answer()]
        answers[0].take(self._read, pair[0])
        answers[0].keep()
        self.in_thread(lambda: answers[1].take(self._read, pair[1])).join()
        answers[1].keep()
        return answers

    def _together(self, pair: tuple[int, int]) -> list[_Answer]:
        """Both rows, taken in turns."""
        answers, turns = [_Answer(), _Answer()], _Turns()

        def read(me: int) -> None:
            with turns.taken_by(me):
                answers[me].take(self._read, pair[me])

        other = self.in_thread(lambda: read(1))
        read(0)
        other.join()
        for answer in answers:
            answer.keep()
        return answers

    def in_thread(self, body: Callable[[], None]) -> threading.Thread:
        """Start a thread that runs this, in the context of the thread that made the object."""
        variables = contextvars.copy_context()

        def run() -> None:
            with self._context.in_force():
                body()

        thread = threading.Thread(target=lambda: variables.run(run), name=PROBE_THREAD, daemon=True)
        thread.start()
        return thread


class _Answer:
    """What a read gave."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def take(self, read: Callable[[int], Any], row: int) -> None:
        try:
            self.value = read(row)
        except BaseException as error:  # noqa: BLE001 - the dataset's own code; what it raises is compared
            self.error = error

    def keep(self) -> None:
        """Copy what it gave, which the next read may overwrite."""
        self.value = private_copy(self.value)

    def differs(self, alone: _Answer) -> str | None:
        if self.error is not None or alone.error is not None:
            return None if alone.error is not None else f"it raises {type(self.error).__name__}: {self.error}"
        try:
            return difference(self.value, alone.value)
        except Exception as error:  # noqa: BLE001 - comparing the user's own objects
            return f"comparing it raises {type(error).__name__}: {error}"


def _compare(pair: tuple[int, int], got: list[_Answer], alone: list[_Answer]) -> Finding | None:
    for i, row in enumerate(pair):
        what = got[i].differs(alone[i])
        if what is not None:
            return Finding(row, pair[1 - i], what, got[i].error)
    return None


class _Turns:
    """Lets two threads go on in turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the rest
        self._turn = 0
        self._here = [False, False]  # has begun
        self._gone = [False, False]  # has ended
        self._stuck = [False, False]  # did not come when it was its turn
        self._left = [MOST_TURNS, MOST_TURNS]

    def taken_by(self, me: int) -> _InTurns:
        """A context in which this thread takes turns with the other one."""
        return _InTurns(self, me)

    def begin(self, me: int) -> None:
        with self._changed:
            self._here[me] = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._here[1 - me] and self._turn == me, BEGIN_SECONDS)

    def hand_over(self, me: int) -> None:
        """Let the other one go on, and wait until it is my turn again."""
        other = 1 - me
        with self._changed:
            self._stuck[me] = False
            self._left[me] -= 1
            self._turn = other
            self._changed.notify_all()
            if self._gone[other] or self._stuck[other]:
                return
            if not self._changed.wait_for(lambda: self._turn == me or self._gone[other], TURN_SECONDS):
                self._stuck[other] = True

    def ends(self, me: int) -> bool:
        return self._gone[1 - me] or self._left[me] <= 0

    def end(self, me: int) -> None:
        with self._changed:
            self._gone[me] = True
            self._turn = 1 - me
            self._changed.notify_all()


class _InTurns:
    """Installs the profile function of a thread, and puts the old one back."""

    def __init__(self, turns: _Turns, me: int) -> None:
        self._turns = turns
        self._me = me
        self._old: Any = None
        self._at_call: Any = None  # CPython's call of it holds no reference: a collection right before that may run it, and unset it

    def __enter__(self) -> None:
        turns, me = self._turns, self._me
        self._old = sys.getprofile()
        turns.begin(me)

        def at_call(frame: Any, event: str, arg: object) -> None:
            if turns.ends(me):
                sys.setprofile(None)
            elif arg is not sys.setprofile:  # since CPython 3.12 one of the threads sees its return, and would be a step behind
                turns.hand_over(me)

        self._at_call = at_call
        sys.setprofile(at_call)

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._old)
        self._turns.end(self._me)
