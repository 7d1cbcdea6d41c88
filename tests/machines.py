"""Simulated machines for the controller of reader threads: cores, one lock, threads that sleep, compute, and hold the lock. No real time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from prefetchshard.reading.controller import Bounds, Controller, Decision, Load

TICK = 0.0005
GLANCE = 0.005
DEPTH = 2


@dataclass(frozen=True)
class Work:
    """What an example costs, in seconds.

    Attributes:
        sleeping: that it waits.
        computing: on a CPU, without the lock.
        locked: on a CPU, with the lock.
        gate: that it waits while it holds a lock of its own, so that it is one at a time.
    """

    sleeping: float = 0.0
    computing: float = 0.0
    locked: float = 0.0
    gate: float = 0.0

    def times(self, factor: float) -> Work:
        return Work(self.sleeping * factor, self.computing * factor, self.locked * factor, self.gate * factor)


@dataclass
class Thread:
    left: list[float] = field(default_factory=list)  # of each kind of work of its part
    batch: int = -1

    @property
    def phase(self) -> int:
        for i, left in enumerate(self.left):
            if left > 0:
                return i
        return -1


class Machine:
    """Runs a loop over batches, ticks at a time.

    Args:
        work: of an example, by the number of its batch.
        cores: that there are.
        rows: of a batch.
        step: seconds that the consumer takes for a batch.
        controlled: whether the controller decides; else there are `workers` threads throughout.
        workers: at first.
        most: threads that the controller may have.
        slots: batches that may be worked on, or wait; None: as many as the threads need.
        noise: of how long things take, a standard deviation of the logarithm.
        seed: of the noise.

    Attributes:
        taken_at: when each batch was handed out.
        decisions: with the number of batches handed out until then.
        most_seen: threads at once.
    """

    def __init__(
        self,
        work: Callable[[int], Work],
        *,
        cores: int = 2,
        rows: int = 16,
        step: float = 0.0,
        controlled: bool = True,
        workers: int = 4,
        most: int = 48,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.work, self.cores, self.rows, self.step = work, cores, rows, step
        self.bounds = Bounds(min(cores, 16), most)
        self.noise = random.Random(seed), noise
        self.now = self.stall = self.busy = self.cpu = self.contended = 0.0
        self.parts = self.dealt_rows = 0
        self.threads = [Thread() for _ in range(workers)]
        self.wanted = workers
        self.open: dict[int, int] = {}  # rows that are not done, by batch
        self.begun = 0
        self.free_at = 0.0  # when the consumer asks for the next
        self.taken_at: list[float] = []
        self.decisions: list[tuple[int, Decision]] = []
        self.most_seen = workers
        self.due_at = GLANCE
        self.controller = Controller(self.load()) if controlled else None

    def load(self) -> Load:
        return Load(
            at=self.now,
            batches=len(self.taken_at),
            stall_seconds=self.stall,
            busy_seconds=self.busy,
            cpu_seconds=self.cpu,
            contended=self.contended,
            parts=self.parts,
        )

    def run(self, batches: int) -> Machine:
        while len(self.taken_at) < batches:
            self._tick()
        return self

    def run_for(self, seconds: float) -> Machine:
        until = self.now + seconds
        while self.now < until:
            self._tick()
        return self

    def pace(self, skip: int) -> float:
        """Seconds a batch after the first ones."""
        return (self.taken_at[-1] - self.taken_at[skip]) / (len(self.taken_at) - 1 - skip)

    # -- one tick

    def _tick(self) -> None:
        for thread in self.threads:
            if not thread.left:
                self._deal(thread)
        self._advance()
        self.now += TICK
        self._consume()
        if self.controller is not None and self.now >= self.due_at:
            self._look(self.controller)
        if len(self.threads) > self.wanted:
            idle = [thread for thread in self.threads if not thread.left]
            for thread in idle[: len(self.threads) - self.wanted]:
                self.threads.remove(thread)

    @property
    def _slots(self) -> int:
        return 2 + max(2, 1 + math.ceil(self.wanted / self.rows))

    def _deal(self, thread: Thread) -> None:
        if self.dealt_rows == self.begun * self.rows:
            if self.begun - len(self.taken_at) >= self._slots + DEPTH:
                return
            self.open[self.begun] = self.rows
            self.begun += 1
        batch = self.begun - 1
        size = min(math.ceil(self.rows / self.wanted), self.begun * self.rows - self.dealt_rows)
        self.dealt_rows += size
        dice, deviation = self.noise
        work = self.work(batch).times(size * dice.lognormvariate(0.0, deviation))
        thread.left, thread.batch = [work.gate, work.sleeping, work.computing, work.locked], batch
        self.open[batch] -= size - 1  # one is left until the part is done

    def _advance(self) -> None:
        busy = [thread for thread in self.threads if thread.left]
        phases: list[list[Thread]] = [[], [], [], [], []]
        for thread in busy:
            phases[thread.phase].append(thread)
        gated, asleep, computing, locked, _ = phases
        self.busy += TICK * len(busy)
        runnable = len(computing) + bool(locked)
        share = min(1.0, self.cores / max(1, runnable))
        self.cpu += TICK * share * runnable
        fought = len(locked) > 1
        self.contended += 0.02 * ((len(locked) - 1) / len(locked) - self.contended if fought else -self.contended)
        for thread in asleep:
            thread.left[1] -= TICK
        for thread in gated[:1]:
            thread.left[0] -= TICK
        for thread in computing:
            thread.left[2] -= TICK * share
        for thread in locked[:1]:  # those who fight over it lose half of the time
            thread.left[3] -= TICK * share * (0.55 if fought else 1.0)
        for thread in busy:
            if thread.phase == -1:
                thread.left = []
                self.parts += 1
                self.open[thread.batch] -= 1

    def _consume(self) -> None:
        while True:
            number = len(self.taken_at)
            if self.now < self.free_at or number not in self.open or self.open[number] or self.dealt_rows < (number + 1) * self.rows:
                break
            del self.open[number]
            self.taken_at.append(self.now)
            self.free_at = self.now + self.step
        if self.now >= self.free_at:
            self.stall += TICK

    def _look(self, controller: Controller) -> None:
        self.due_at = self.now + GLANCE
        decision = controller.decide(self.load(), self.wanted, self.bounds)
        if decision is None:
            return
        assert decision.reason
        assert decision.workers != self.wanted
        assert 1 <= decision.workers <= self.bounds.most
        self.decisions.append((len(self.taken_at), decision))
        self.wanted = decision.workers
        while len(self.threads) < self.wanted:
            self.threads.append(Thread())
        self.most_seen = max(self.most_seen, len(self.threads))


def best_pace(work: Work, *, cores: int, rows: int = 16, most: int = 32) -> float:
    """Seconds a batch with the best fixed number of threads."""
    numbers = [number for number in (1, 2, 4, 8, 16, 32) if number <= most]
    return min(Machine(lambda _: work, cores=cores, rows=rows, controlled=False, workers=number).run(50).pace(20) for number in numbers)
