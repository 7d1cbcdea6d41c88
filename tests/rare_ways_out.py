"""Ways out of a program that no list would meet; see `ways_out.py`.

Left out, as the fault is not this library's:

- A forked child that ends by `sys.exit` or an exception: after `jax.device_put` JAX alone hangs there, when the interpreter frees its devices.
- A thread that is no daemon and waits for a batch that never comes: the interpreter waits for it before anything else at exit.
- A destructor that takes a batch, or begins a run, when the interpreter goes down: the modules that this needs have been emptied by then.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from support import pairwise
from ways_out import BOOM, CLOSABLE, IN_THREAD, INTERRUPTED, MANY, NEVER, QUIET, SOURCES, STUCK, Way, start, traceback


@dataclass(frozen=True)
class Rare:
    """A program that goes on from `make()`, for each of some sources.

    Attributes:
        program: its text.
        sources: the kinds of sources with which it is run.
        workers, count, blocks_at, options: of `start`.
        gives_up: it closes a blocked source, and says so where that does not come out.
        code, stderr, stdout, flags: as in `Way`.
    """

    program: str
    sources: tuple[str, ...] = ("generator",)
    workers: int = 1
    count: int = MANY
    blocks_at: int = NEVER
    options: str = ""
    gives_up: bool = False
    code: int = 0
    stderr: str = QUIET
    stdout: str = ""
    flags: tuple[str, ...] = ()

    def with_source(self, source: str) -> Way:
        begin = start(source, self.workers, count=self.count, blocks_at=self.blocks_at, options=self.options)
        stderr = STUCK + self.stderr if self.gives_up and source not in CLOSABLE else self.stderr
        return Way(begin + self.program, self.code, stderr, self.stdout, self.flags)


# --- tasks

_CONSUME = """
async def consume(loader):
    async for _ in loader: pass
"""
_WAITING = ("generator", "async", "waiting")

TASKS = {
    "a task that is left at the end of asyncio.run": Rare(
        _CONSUME
        + """
async def main():
    kept.append(asyncio.create_task(consume(make())))
    await until(blocked.is_set)
    here()
asyncio.run(main())
""",
        _WAITING,
        blocks_at=2,
    ),
    "a task in an event loop that is stopped and closed": Rare(
        _CONSUME
        + """
async def main():
    async for _ in ps.prefetch([X] * 3, S): pass  # a whole run: its end was waited for in a thread
    kept.append(asyncio.create_task(consume(make())))
    await until(blocked.is_set)
    here()
    loop.stop()
loop = asyncio.new_event_loop()
loop.set_exception_handler(lambda *_: None)  # asyncio says that the task is pending still
kept.append(loop.create_task(main()))
loop.run_forever()
loop.close()
""",
        _WAITING,
        blocks_at=2,
    ),
    "a task that is cancelled while it waits": Rare(
        _CONSUME
        + """
async def main():
    task = asyncio.create_task(consume(make()))
    await until(blocked.is_set)
    here()
    task.cancel()
    try: await task
    except asyncio.CancelledError: print("cancelled")
asyncio.run(main())
""",
        _WAITING,
        blocks_at=2,
        stdout="cancelled\n",
    ),
    "a task of trio that is cancelled while it waits": Rare(
        _CONSUME
        + """
import trio
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume, make())
        await until(blocked.is_set)
        here()
        nursery.cancel_scope.cancel()
    print("cancelled")
trio.run(main)
""",
        _WAITING,
        blocks_at=2,
        stdout="cancelled\n",
    ),
    "a task in a group where another one fails": Rare(
        _CONSUME
        + """
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(consume(make()))
        await until(blocked.is_set)
        here()
        raise Boom("boom")
try: asyncio.run(main())
except* Boom: print("boom")
""",
        _WAITING,
        blocks_at=2,
        stdout="boom\n",
    ),
    "an async generator over a loader, left suspended": Rare(
        """
async def through():
    async for batch in make(): yield batch
async def main():
    batches = through()
    await anext(batches)
    kept.append(batches)
    here()
asyncio.run(main())
""",
        ("async",),
    ),
    "a deadline that passes again and again": Rare(
        """
async def main():
    it = aiter(make())
    for _ in range(2): await anext(it)
    here()
    for _ in range(3):
        try:
            async with asyncio.timeout(0.01): await anext(it)
        except TimeoutError: print("late")
asyncio.run(main())
""",
        blocks_at=2,
        stdout="late\n" * 3,
    ),
    "two event loops, one after the other": Rare(
        """
async def main():
    async for _ in ps.prefetch(source, S): break
asyncio.run(main())
asyncio.run(main())
here()
""",
        ("async",),
    ),
}

# --- threads

_SHARE = """
def take():
    for _ in it: pass
def started(daemon):
    threads = [threading.Thread(target=take, daemon=daemon) for _ in range(4)]
    for thread in threads: thread.start()
    return threads
it = iter(make())
"""
_STRIKE = """
start_thread, struck = threading.Thread.start, []
def start(thread):
    if not struck and thread.name.startswith("prefetchshard"):
        struck.append(True)
        wait_until(lambda: is_in("__iter__"))
        here()
        os.kill(os.getpid(), signal.SIGINT)
    start_thread(thread)
threading.Thread.start = start
loader = make()
"""

THREADS = {
    "four threads share a run to its end": Rare(_SHARE + "started(False)\nhere()\n", ("generator", "jax.Arrays"), workers=4, count=200),
    "four daemons share a run": Rare(
        _SHARE + "started(True)\nwait_until(lambda: it.stats().batches > 20)\nhere()\n", ("dataset", "async"), workers=4
    ),
    "four threads wait, and the main thread closes": Rare(
        _SHARE
        + """
threads = started(False)
wait_until(lambda: blocked.is_set() and waits(it) and it.stats().batches == 2)
here()
it.close()
for thread in threads: thread.join()
print("joined")
""",
        ("generator", "dataset", "async", "waiting"),
        blocks_at=2,
        gives_up=True,
        stdout="joined\n",
    ),
    "an exception in with, in a thread": Rare(
        """
def main():
    with make() as loader:
        for _ in loader:
            here()
            raise Boom("boom")
thread = threading.Thread(target=main); thread.start(); thread.join()
print(loader_threads())
""",
        stderr=IN_THREAD + BOOM,
        stdout="[]\n",
    ),
    "a pool that was not shut down": Rare(
        """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
it = pool.submit(lambda: iter(make())).result()
pool.submit(next, it).result()
here()
"""
    ),
    "interrupt_main by a transform": Rare(
        """
import _thread
begun = threading.Event()
def fail():
    begun.wait()
    wait_until(lambda: waits(it))
    here()
    _thread.interrupt_main()
    time.sleep(1000)
it = iter(make())
begun.set()
next(it)
""",
        options="transform=lambda batch: fail()",
        code=-signal.SIGINT,
        stderr=INTERRUPTED,
    ),
    "ctrl-c inside iter(loader)": Rare(_STRIKE + "iter(loader)\n", ("generator", "dataset"), code=-signal.SIGINT, stderr=INTERRUPTED),
    "ctrl-c inside iter(loader), and on": Rare(
        _STRIKE + "try: iter(loader)\nexcept KeyboardInterrupt: print(len(list(loader)))\n", ("generator", "dataset"), count=3, stdout="3\n"
    ),
}

# --- loaders in loaders


def _nested() -> Iterator[tuple[str, Way]]:
    ends = {
        "end": ("pass", 0, QUIET),
        "error": ('raise Boom("boom")', 1, BOOM),
        "exit": ("sys.exit(3)", 3, QUIET),
        "drop": ("del it", 0, QUIET),
    }
    arrive = {
        "middle": "next(it); next(it)",
        "blocked": "next(it); next(it); wait_until(blocked.is_set)",
        "last": "for _ in range(COUNT): next(it)",
    }
    for source, place, end, inner in pairwise(("generator", "dataset", "async", "waiting"), arrive, ends, ("make()", "iter(make())")):
        code, exit_code, says = ends[end]
        program = start(source, count=3 if place == "last" else MANY, blocks_at=2 if place == "blocked" else NEVER)
        program += f"it = iter(ps.prefetch({inner}, S))\n{arrive[place]}\nhere()\n{code}\n"
        yield f"{inner} as a source, {source}, {place}, {end}", Way(program, exit_code, says)


SEVERAL = {
    "a loader in a loader, both in with": Rare(
        """
with make() as inner, ps.prefetch(inner, S) as outer:
    it = iter(outer); next(it); next(it); wait_until(blocked.is_set)
    here()
""",
        blocks_at=2,
        stderr=f"({STUCK})+",  # the outer one closes the inner one in a thread of its own, which may still be at it
    ),
    "two loaders, one blocked and one full": Rare(
        """
a, b = iter(make()), iter(ps.prefetch(itertools.repeat(X), S))
for _ in zip(range(2), a, b): pass
wait_until(lambda: blocked.is_set() and b.stats().ready.senders_waiting)
here()
""",
        blocks_at=2,
    ),
}

# --- processes

_FORK = """
import warnings; warnings.simplefilter("ignore")
it = iter(make()); next(it)
here()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    {child}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
next(it)
"""
_OF_CHILD = start("generator") + "next(iter(make())); sys.exit(5)"

PROCESSES = {
    "a forked child": Rare(_FORK.format(child="os._exit(5)"), ("generator", "dataset"), stdout="5\n"),
    "a forked child that closes": Rare(_FORK.format(child="it.close(); os._exit(5)"), ("generator", "dataset"), stdout="5\n"),
    "a forked child that becomes another program": Rare(
        _FORK.format(child="os.execv(sys.executable, [sys.executable, '-c', ''])"), ("generator", "dataset"), stdout="0\n"
    ),
    "a spawned child": Rare(
        f"""
import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=exec, args=({_OF_CHILD!r}, {{}}))
it = iter(make()); next(it)
child.start()
child.join()
print(child.exitcode)
here()
""",
        ("dataset",),
        stdout="5\n",
    ),
    "a spawned daemon": Rare(
        """
import multiprocessing
it = iter(make()); next(it)
multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,), daemon=True).start()
here()
"""
    ),
    "another program in its place": Rare("it = iter(make()); next(it)\nhere()\nos.execv('/bin/sh', ['sh', '-c', 'exit 6'])\n", code=6),
    "kill": Rare("it = iter(make()); next(it)\nhere()\nos.kill(os.getpid(), signal.SIGKILL)\n", ("async",), code=-signal.SIGKILL),
}

# --- the interpreter

_TAKE = "it = iter(make()); next(it)\nhere()\n"
_BLOCK = "it = iter(make()); next(it); wait_until(blocked.is_set)\nhere()\n"
_STILL = r"thread prefetchshard-\S+ is still inside .*\n(  .*\n)+"

INTERPRETER = {
    "-X dev -W error": Rare(_TAKE, ("generator", "async"), workers=4, flags=("-X", "dev", "-W", "error")),
    "-W error": Rare(_TAKE, ("dataset", "jax.Arrays"), workers=4, flags=("-W", "error")),
    "-X faulthandler": Rare(_TAKE, ("waiting",), flags=("-X", "faulthandler")),
    "-OO": Rare(_TAKE, ("collated",), flags=("-OO",)),
    "-u": Rare(_TAKE, ("rebatch",), flags=("-u",)),
    "-i": Rare(_TAKE, stderr=r"(>>> )?\n?", flags=("-i",)),
    "-W error, in with": Rare(
        "with make() as loader:\n    it = iter(loader); next(it); wait_until(blocked.is_set)\n    here()\n",
        blocks_at=2,
        code=1,
        stderr=traceback(r"prefetchshard\.base\.errors\.StuckThreadWarning: " + _STILL),
        flags=("-W", "error"),
    ),
    "-W error, an exception in with": Rare(
        'with make() as loader:\n    it = iter(loader); next(it); wait_until(blocked.is_set)\n    here()\n    raise Boom("boom")\n',
        blocks_at=2,
        code=1,
        stderr=BOOM + "StuckThreadWarning: " + _STILL + r"\n*",
        flags=("-W", "error"),
    ),
    "stdin closed": Rare(_BLOCK + "os.close(0)\n", blocks_at=2),
    "stdout closed": Rare(_BLOCK + "os.close(1)\n", ("dataset",), blocks_at=2, workers=4),
    "stderr closed": Rare(_BLOCK + "os.close(2)\n", ("async",), blocks_at=2),
    "no stdout and no stderr": Rare(_BLOCK + "sys.stdout = sys.stderr = None\n", ("collated",), blocks_at=2),
    "the garbage collector off": Rare(_BLOCK + "gc.disable(); gc.freeze()\n", ("per_worker",), blocks_at=2, workers=4),
    "the library no longer imported": Rare(
        _BLOCK + "for name in [name for name in sys.modules if name.startswith('prefetchshard')]: del sys.modules[name]\n",
        ("arrays",),
        blocks_at=2,
    ),
    "a log at DEBUG": Rare(
        "import logging; logging.basicConfig(level=logging.DEBUG, handlers=[logging.NullHandler()])\n" + _BLOCK, blocks_at=2
    ),
    "a hook for exceptions that closes": Rare(
        """
def hook(*error):
    it.close()
    print(loader_threads())
    sys.__excepthook__(*error)
sys.excepthook = hook
it = iter(make()); next(it)
here()
raise Boom("boom")
""",
        code=1,
        stderr=BOOM,
        stdout="[]\n",
    ),
    "a handler at exit that begins a run": Rare(
        "loader = make()\natexit.register(lambda: next(iter(loader)))\nhere()\n", ("generator", "dataset", "iterator", "async")
    ),
    "a handler at exit that takes": Rare("it = iter(make()); next(it)\natexit.register(lambda: next(it))\nhere()\n"),
    "a handler at exit that fails": Rare(
        "atexit.register(fail)\n" + _TAKE, stderr=r"Exception ignored in atexit callback:? <function fail at 0x\w+>:?\n" + BOOM
    ),
    "a handler at exit that comes after the library's": Rare(
        """
it = iter(make()); next(it)
atexit.unregister(ps.running.at_exit.close_all)
def late():
    print(next(it, "over"))
    it.close()
atexit.register(late)
atexit.register(ps.running.at_exit.close_all)
here()
""",
        stdout="over\n",
    ),
    "weakref.finalize that closes": Rare(
        """
class Anything: pass
anything = Anything()
it = iter(make()); next(it); wait_until(blocked.is_set)
weakref.finalize(anything, it.close)
here()
""",
        blocks_at=2,
        stderr=f"({STUCK})?",  # the order in which `weakref` and this library are called at exit is that of their imports
    ),
    "a recursion without end in the loop": Rare(
        "def deep(): deep()\nfor _ in make():\n    here()\n    deep()\n",
        code=1,
        stderr=traceback("RecursionError: maximum recursion depth exceeded.*"),
    ),
}

# --- who holds the run

_CLOSER = """
class Closer:
    def __init__(self, closable): self.closable, self.me = closable, {me}
    def __del__(self): self.closable.close()
"""
_FAILING = """
class Source:
    def __iter__(self): return self
    def __next__(self): return X
    def close(self): {close}
"""

HELD = {
    "a generator left suspended": (
        "def through():\n    for batch in make(): yield batch\nbatches = through(); next(batches); next(batches)\nhere()\n"
    ),
    "a generator in a cycle": (
        "def through():\n    me = kept\n    for batch in make(): yield batch\nkept.append(through()); next(kept[0])\nhere()\n"
    ),
    "another module": (
        "import types\nother = sys.modules['other'] = types.ModuleType('other')\nother.it = iter(make()); next(other.it)\ndel other\nhere()\n"
    ),
    "a thread's local": "local = threading.local(); local.it = iter(make()); next(local.it)\nhere()\n",
    "a context variable": "import contextvars\nheld = contextvars.ContextVar('held'); held.set(iter(make())); next(held.get())\nhere()\n",
    "an exception that was caught": (
        "def f():\n    it = iter(make()); next(it)\n    raise Boom\ntry: f()\nexcept Boom as error: sys.last_value = error\nhere()\n"
    ),
    "a default argument": "it = iter(make()); next(it)\ndef f(it=it): pass\ndel it\nhere()\n",
    "an exit stack": "import contextlib\nstack = contextlib.ExitStack(); it = iter(stack.enter_context(make())); next(it)\nhere()\n",
    "closing": "import contextlib\nwith contextlib.closing(iter(make())) as it: next(it)\nhere()\n",
    "spec": "loader = make(); loader.spec()\nhere()\n",
    "a destructor that closes": _CLOSER.format(me="None") + "closer = Closer(make()); it = iter(closer.closable); next(it)\nhere()\n",
    "a destructor in a cycle": _CLOSER.format(me="self") + "closer = Closer(iter(make())); next(closer.closable); del closer\nhere()\n",
}
CLOSING = {
    "a close that fails, in with": Rare(
        _FAILING.format(close="fail()") + "with ps.prefetch(Source(), S) as loader:\n    it = iter(loader); next(it)\n    here()\n",
        stderr=r"\S+:\d+: PrefetchWarning: closing the source raised Boom: boom\n(  .*\n)?",
    ),
    "a close that fails, at the end": Rare(_FAILING.format(close="fail()") + "it = iter(ps.prefetch(Source(), S)); next(it)\nhere()\n"),
    "a close that exits, at the end": Rare(
        _FAILING.format(close="sys.exit(9)") + "it = iter(ps.prefetch(Source(), S)); next(it)\nhere()\n"
    ),
}


def _rare() -> Iterator[tuple[str, Way]]:
    tables = {"task": TASKS, "thread": THREADS, "several": SEVERAL, "process": PROCESSES, "interpreter": INTERPRETER, "source": CLOSING}
    for kind, table in tables.items():
        for name, rare in table.items():
            for source in rare.sources:
                yield f"{kind}: {name}, {source}", rare.with_source(source)
    for name, way in _nested():
        yield f"several: {name}", way
    for i, (name, program) in enumerate(HELD.items()):
        source = tuple(SOURCES)[i % len(SOURCES)]
        yield f"held by {name}, {source}", Way(start(source) + program)


RARE: dict[str, Way] = dict(_rare())
