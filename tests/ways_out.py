"""Ways out of a program: what a program reads, where it stands, how it ends, and what must come of that.

A way is a program of its own. The lists below make them; `rare_ways_out.py` holds those that no list would meet.
"""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from support import pairwise

START = """
import anyio, asyncio, atexit, gc, itertools, os, signal, sys, threading, time, weakref
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import prefetchshard as ps

S = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
X = np.ones((8, 4), np.float32)
kept, cleaned = [], []

class Boom(Exception): pass

def here():  # the test takes the time from here on
    os.write(1, f"here {time.monotonic()}\\n".encode())  # whole, also where several threads come here

def wait_until(ready):
    while not ready(): time.sleep(0.001)

async def until(ready):
    while not ready(): await anyio.sleep(0.001)

def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetchshard")]

def is_in(name, ident=threading.main_thread().ident):
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code.co_name != name: frame = frame.f_back
    return frame is not None

def waits(it):
    return it.stats().ready.receivers_waiting

# What a source does before it gives something of batch i
blocked, gate = threading.Event(), threading.Event()

def turn(i):
    if i == FAILS_AT: fail()
    if i >= BLOCKS_AT:
        blocked.set()
        gate.wait(1000)

async def aturn(i):
    if i == FAILS_AT: fail()
    if i >= BLOCKS_AT:
        blocked.set()
        while not gate.is_set(): await anyio.sleep(0.01)
    await anyio.sleep(0)

def fail(): raise Boom("boom")
"""

DATASET = """
class Dataset:
    def __len__(self): return 8 * COUNT
    def __getitem__(self, row):
        turn(row // 8)
        return X[0]"""

SOURCES = {
    "iterator": """
class Source:
    i = -1
    def __iter__(self): return self
    def __next__(self):
        self.i += 1
        if self.i == COUNT: raise StopIteration
        turn(self.i)
        return X
def make(**options): return ps.prefetch(Source(), S, **OPTIONS, **options)
""",
    "waiting": """
class Source:
    i, closed = -1, threading.Event()
    def __iter__(self): return self
    def __next__(self):
        self.i += 1
        if self.i == FAILS_AT: fail()
        if self.i >= BLOCKS_AT:
            blocked.set()
            self.closed.wait()
        if self.i == COUNT or self.closed.is_set(): raise StopIteration
        return X
    def close(self): self.closed.set()
def make(**options): return ps.prefetch(Source(), S, **OPTIONS, **options)
""",
    "generator": """
def source():
    try:
        for i in range(COUNT):
            turn(i)
            yield X
    finally:
        cleaned.append(True)
def make(**options): return ps.prefetch(source(), S, **OPTIONS, **options)
""",
    "dataset": DATASET
    + """
def make(**options): return ps.Loader(Dataset(), S, batch_size=8, **OPTIONS, **options)
""",
    "collated": """
def collate(rows):
    turn(rows[0] // 8)
    return X
def make(**options): return ps.Loader(lambda: iter(range(8 * COUNT)), S, batch_size=8, collate=collate, **OPTIONS, **options)
""",
    "async": """
async def source():
    try:
        for i in range(COUNT):
            await aturn(i)
            yield X
    finally:
        await anyio.sleep(0)
def make(**options): return ps.prefetch(source(), S, **OPTIONS, **options)
""",
    "rebatch": """
def pieces():
    for i in range(8 * COUNT // 6):
        turn(6 * i // 8)
        yield X[:6]
def make(**options): return ps.prefetch(ps.rebatch(pieces, 8), S, **OPTIONS, **options)
""",
    "per_worker": DATASET
    + """
    def close(self): pass
def make(**options): return ps.Loader(ps.per_worker(Dataset), S, batch_size=8, **OPTIONS, **options)
""",
    "jax.Arrays": """
on_all = jax.device_put(X, NamedSharding(S.mesh, P()))
def source():
    for i in range(COUNT):
        turn(i)
        yield on_all
def make(**options): return ps.prefetch(source(), S, **OPTIONS, **options)
""",
    "arrays": """
def of_row(row):
    turn(row["row"] // 8)
    return row
def make(**options):
    rows = {"x": np.ones((8 * COUNT, 4), np.float32), "row": np.arange(8 * COUNT)}
    return ps.Loader(rows, S, batch_size=8, **{"transform": of_row, **OPTIONS, **options})
""",
}
CLOSABLE = {"waiting", "async"}
"""Sources that come out of a wait when they are closed. Closing gives the others up, and says so."""

NEVER, MANY = 10**9, 3000


def start(source: str, workers: int = 1, *, count: int = MANY, blocks_at: int = NEVER, fails_at: int = NEVER, options: str = "") -> str:
    """The program up to `make()`, which makes the loader."""
    settings = (
        f"COUNT, BLOCKS_AT, FAILS_AT, OPTIONS = {count}, {blocks_at}, {fails_at}, dict(workers={workers}{options and ', ' + options})\n"
    )
    return START + settings + SOURCES[source]


# --- what is to be seen of an end, as regular expressions

QUIET = ""
STUCK = (
    r"\S+:\d+: StuckThreadWarning: (thread prefetchshard-\S+ is still inside the source's own code and was given up on; .*\n"
    r"(  .*\n)+\n)+(  .*\n)?"
)
_FRAMES = r"Traceback \(most recent call last\):\n(  .*\n)+"
# CPython before 3.13 prints an empty line below the frame that Ctrl-C meets at its very entry: its mark `^^^` has no width there
_INTERRUPT = ("" if sys.version_info >= (3, 13) else r"\n?") + "KeyboardInterrupt"
_NOTES = r"(prefetchshard: while .*\n|-{20}\nFor simplicity, JAX has removed its internal frames .*\n)*"
_NEXT = r"\n(During handling of the above exception, another exception occurred|The above exception was the direct cause of the following exception):\n\n"


def traceback(last: str, *earlier: str) -> str:
    """Exactly one traceback, which ends so; what went before it in a chain is `earlier`."""
    return _NEXT.join(_FRAMES + line + r"\n" + _NOTES for line in (*earlier, last))


BOOM = traceback("Boom: boom")
INTERRUPTED = traceback(_INTERRUPT)
INTERRUPTED_TASK = traceback(_INTERRUPT, r"asyncio\.exceptions\.CancelledError")
IN_THREAD = r"Exception in thread Thread-\d+ \(\w+\):\n"
AT_EXIT = r"Exception ignored in atexit callback:? <function close_all at 0x\w+>:?\n"


@dataclass(frozen=True)
class Way:
    """A program and what must come of it.

    Attributes:
        program: prints `here` and the time where its end begins, and what it wants to say after that.
        code: its exit code.
        stderr: what it may say, whole, as a regular expression.
        stdout: what it says beside `here`.
        flags: of the interpreter.
    """

    program: str
    code: int = 0
    stderr: str = QUIET
    stdout: str = ""
    flags: tuple[str, ...] = ()


# --- ends that the program brings about by itself

PLACES = ("made", "begun", "middle", "blocked", "last", "ended")
ENDS = {
    "end": "pass",
    "exit": "sys.exit(3)",
    "error": 'raise Boom("boom")',
    "_exit": "os._exit(4)",
    "close": "held.close()",
    "drop": "del held, it, loader; gc.collect()",
    "cycle": "kept.append([kept, held])",
    "destructor": """
class Closer:
    def __init__(self, held): self.held = held
    def __del__(self): self.held.close()
sys.modules["__main__"].closer = Closer(held)
""",
    "atexit": "atexit.register(held.close)",
}
FORMS = ("module", "function", "with", "asyncio", "async with", "trio", "thread", "daemon")
_ASYNC = ("asyncio", "async with", "trio")

_ARRIVE = {
    "made": "pass",
    "begun": "wait_until(loader_threads)",
    "middle": "next(it); next(it)",
    "blocked": "next(it); next(it); wait_until(blocked.is_set)",
    "last": "for _ in range(COUNT): next(it)",
    "ended": "assert len(list(it)) == COUNT",
}
_ARRIVE_ASYNC = {
    "made": "pass",
    "begun": "await until(loader_threads)",
    "middle": "await anext(it); await anext(it)",
    "blocked": "await anext(it); await anext(it); await until(blocked.is_set)",
    "last": "for _ in range(COUNT): await anext(it)",
    "ended": "assert len([batch async for batch in it]) == COUNT",
}
_FORMS = {
    "module": "loader = make()\n{body}",
    "function": "def main():\n    loader = make()\n{body4}\nmain()",
    "with": "with make() as loader:\n{body4}",
    "asyncio": "async def main():\n    loader = make()\n{body4}\nasyncio.run(main())",
    "async with": "async def main():\n    async with make() as loader:\n{body8}\nasyncio.run(main())",
    "trio": "import trio\nasync def main():\n    loader = make()\n{body4}\ntrio.run(main)",
    "thread": "def main():\n    loader = make()\n{body4}\nthreading.Thread(target=main).start()",
}
_DAEMON = """
def main():
    loader = make()
    {it}
    {arrive}
    kept.extend([held, it, loader])
    arrived.set()
    threading.Event().wait()
arrived = threading.Event()
threading.Thread(target=main, daemon=True).start()
arrived.wait()
held, it, loader = kept
here()
{end}
"""


def _formed(form: str, body: str) -> str:
    return form.format(body=body, body4=textwrap.indent(body, " " * 4), body8=textwrap.indent(body, " " * 8))


def _by_itself(source: str, place: str, end: str, form: str, workers: int) -> Way:
    is_async = form in _ASYNC
    program = start(source, workers, count=3 if place in ("last", "ended") else MANY, blocks_at=2 if place == "blocked" else NEVER)
    it = "it = held = loader" if place == "made" else f"it = held = {'aiter' if is_async else 'iter'}(loader)"
    arrive = (_ARRIVE_ASYNC if is_async else _ARRIVE)[place]
    ends = "await held.aclose()" if is_async and end == "close" else ENDS[end]
    if form == "daemon":
        program += _DAEMON.format(it=it, arrive=arrive, end=ends)
    else:
        program += _formed(_FORMS[form], f"{it}\n{arrive}\nhere()\n{ends}")
    closes = end in ("close", "atexit") or (form in ("with", "async with") and end != "_exit")
    says = STUCK if place == "blocked" and closes and source not in CLOSABLE else QUIET
    code = {"exit": 3, "error": 1, "_exit": 4}.get(end, 0)
    if form == "thread" and end in ("exit", "error"):
        return Way(program, 0, says + (IN_THREAD + BOOM if end == "error" else ""))  # of a thread, not of the program
    return Way(program, code, says + (BOOM if end == "error" else ""))


# --- signals

SIGNALS = {
    "ctrl-c": ("SIGINT", "", -signal.SIGINT, INTERRUPTED),
    "ctrl-c, caught": ("SIGINT", "", 0, QUIET),
    "ctrl-c twice": ("SIGINT", "", -signal.SIGINT, INTERRUPTED + AT_EXIT + traceback(_INTERRUPT + ": ")),
    "term": ("SIGTERM", "", -signal.SIGTERM, QUIET),
    "term, handled": ("SIGTERM", "sys.exit(7)", 7, QUIET),
    "alarm that closes": ("SIGALRM", "held.close()", 0, QUIET),
    "alarm that raises": ("SIGALRM", 'raise Boom("boom")', 1, BOOM),
}
SIGNAL_PLACES = ("next", "close", "body")
SIGNAL_FORMS = ("module", "with", "asyncio", "trio", "daemon")

_SEND = """
def send():
    wait_until(lambda: {ready})
    {patience}
    here()
    os.kill(os.getpid(), signal.{name})
    {again}
patience = ps.running.closing.GIVE_UP_SECONDS
ps.running.closing.GIVE_UP_SECONDS = 300.0  # so that the close is under way still, however late the signal comes
threading.Thread(target=send, daemon=True).start()
{wait}
"""
_READY = {
    "next": "blocked.is_set() and waits(held)",
    "close": "any(is_in('close_runs', ident) for ident in sys._current_frames())",
}
_AGAIN = """
    wait_until(lambda: is_in("close_all") and is_in("close_runs"))
    os.kill(os.getpid(), signal.SIGINT)
"""
_HANDLE = """
def handler(*_):
    {opens}
    {handler}
signal.signal(signal.{name}, handler)
"""
_IN_DAEMON = """
def main():
    loader = make()
{body4}
thread = threading.Thread(target=main, daemon=True)
thread.start()
thread.join()
"""


def _cannot_be(source: str, place: str, how: str, form: str) -> bool:
    is_async, name = form in _ASYNC, SIGNALS[how][0]
    if form == "trio" and how in ("term, handled", "alarm that raises"):
        return True  # what a handler raises inside trio's own code is an internal error for it
    if place == "close" and (source in CLOSABLE or form == "daemon" or (is_async and name == "SIGINT")):
        return True  # such a close is over at once; the one of an event loop is shielded, as it has to be
    if how == "ctrl-c twice" and (source in CLOSABLE or form != "module" or place == "body"):
        return True  # the second one strikes while the interpreter's exit waits for the source
    return (form == "daemon" and place == "body") or (is_async and how == "ctrl-c, caught")


def _struck(place: str, how: str, name: str, is_async: bool) -> str:
    """The program's last part: where the signal strikes."""
    if place == "body":
        text = f"here()\nsignal.raise_signal(signal.{name})"
    else:
        wait = ("await held.aclose()" if is_async else "held.close()") if place == "close" else f"{'async ' * is_async}for _ in it: pass"
        twice = how == "ctrl-c twice"
        patience = "pass" if twice else "ps.running.closing.GIVE_UP_SECONDS = patience"
        text = _SEND.format(ready=_READY[place], patience=patience, name=name, again=_AGAIN if twice else "", wait=wait)
    return f"try:\n{textwrap.indent(text, '    ')}\nexcept KeyboardInterrupt: held.close()" if how == "ctrl-c, caught" else text


def _by_signal(source: str, place: str, how: str, form: str, workers: int) -> Way | None:
    if _cannot_be(source, place, how, form):
        return None
    name, handler, code, says = SIGNALS[how]
    is_async = form in _ASYNC
    program = start(source, workers, blocks_at=2) + "held = None\n"
    if handler:
        program += _HANDLE.format(opens="gate.set()" if place == "close" else "pass", handler=handler, name=name)
    scope = "" if form in ("module", "with") else "global held"
    arrive = (_ARRIVE_ASYNC if is_async else _ARRIVE)["middle" if place == "next" else "blocked"]
    parts = (scope, f"it = held = {'aiter' if is_async else 'iter'}(loader)", arrive, _struck(place, how, name, is_async))
    program += _formed(_IN_DAEMON if form == "daemon" else _FORMS[form], "\n".join(parts))
    is_closed = form == "with" or how in ("alarm that closes", "ctrl-c, caught")
    comes_out = source in CLOSABLE or (place == "close" and handler)  # the handler lets the source go on
    if is_closed and not comes_out and how != "term":
        says = STUCK + says
    if form == "asyncio" and how == "ctrl-c":
        says = INTERRUPTED_TASK
    return Way(program, code, says)


# --- faults

FAULTS = {
    "error": ('raise Boom("boom")', 1, BOOM),
    "exit": ("sys.exit(3)", 3, QUIET),
    "ctrl-c": ("raise KeyboardInterrupt", -signal.SIGINT, INTERRUPTED),
    "end": (
        "raise StopIteration",
        1,
        traceback(r"prefetchshard\.base\.errors\.SourceError: .*", "StopIteration"),
    ),
}
FAULT_SOURCES = ("iterator", "dataset", "async", "jax.Arrays", "arrays")
FAULT_PLACES = ("source", "transform", "device_transform")
FAULT_FORMS = ("module", "asyncio", "trio", "thread")


def _by_fault(source: str, place: str, fault: str, form: str, workers: int) -> Way | None:
    if fault == "end" and place == "source":
        return None  # in an iterator that is the end of the data
    raises, code, says = FAULTS[fault]
    fails_at, options = (1, "") if place == "source" else (NEVER, f"{place}=lambda batch: fail()")
    program = start(source, workers, fails_at=fails_at, options=options) + f"def fail():\n    here()\n    {raises}\n"
    program += _formed(_FORMS[form], f"{'async ' * (form in _ASYNC)}for _ in loader: pass")
    if form == "thread":
        return Way(program, 0, QUIET if fault == "exit" else IN_THREAD + says)
    return Way(program, code, says)


# --- all of them


def _listed() -> Iterator[tuple[str, Way | None]]:
    for source, place, end, form, workers in pairwise(SOURCES, PLACES, ENDS, FORMS, (1, 4)):
        yield f"{source}, {place}, {end}, {form}, {workers}", _by_itself(source, place, end, form, workers)
    for source, place, how, form, workers in pairwise(SOURCES, SIGNAL_PLACES, SIGNALS, SIGNAL_FORMS, (1, 4)):
        yield f"{source}, in {place}, {how}, {form}, {workers}", _by_signal(source, place, how, form, workers)
    for source, place, fault, form, workers in pairwise(FAULT_SOURCES, FAULT_PLACES, FAULTS, FAULT_FORMS, (1, 4)):
        yield f"{source}, {fault} from {place}, {form}, {workers}", _by_fault(source, place, fault, form, workers)


LISTED: dict[str, Way] = {name: way for name, way in _listed() if way is not None}
