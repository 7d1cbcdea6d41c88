"""However a program ends, it ends: no hang, no noise, no abort. Each case is a program of its own.

`test_ways_out.py` has many more, and is slow.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import run_python

START = """
import gc, itertools, os, signal, sys, threading, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import prefetchshard as ps

S = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))

def endless(shape=(8,)):
    while True:
        yield np.ones(shape, np.float32)

def blocked():
    yield np.ones(8)
    time.sleep(1000)

def loader_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetchshard")]

def wait_until(ready):
    while not ready(): time.sleep(0.001)

def main_is_in(name):
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != name: frame = frame.f_back
    return frame is not None
"""


def run(program: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return run_python(START + program, timeout)


def runs(program: str, times: int) -> list[subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(3) as pool:  # more than there are CPUs: each is disturbed by others
        return list(pool.map(lambda _: run(program), range(times)))


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """What came of a case: the cases of the tests that will run are run beside each other, as those tests come."""
    here = sys.modules[__name__]
    items = [
        item for item in request.session.items if getattr(item, "module", None) is here and "done" in getattr(item, "fixturenames", ())
    ]
    cases = [str(item.callspec.params["case"]) for item in items if isinstance(item, pytest.Function)]
    pool = ThreadPoolExecutor(3)
    futures = {case: pool.submit(run, {**QUIET, **RAISES}[case]) for case in cases}
    yield lambda case: futures[case].result()
    pool.shutdown(cancel_futures=True)


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


# --- the end of the main program, while runs are live; nothing is to be seen of them

QUIET = {
    "a run at module level": """
it = iter(ps.prefetch((np.ones((1024, 256), np.float32) for _ in itertools.count()), depth=4))
for _ in range(5): next(it)
""",
    "large batches under way": """
big = np.ones((1024, 9500), np.float32)
it = iter(ps.prefetch((big for _ in itertools.count()), S, reuses_buffers=False))
next(it)
""",
    "a run in a function": """
def main():
    for batch in ps.prefetch(endless((64, 64)), S): break
main()
""",
    "a run whose first batch nobody took": """
it = iter(ps.prefetch(endless((1024, 256)), S))
""",
    "a run that is full": """
it = iter(ps.prefetch(endless(), S)); next(it)
wait_until(lambda: it.stats().ready.senders_waiting)
""",
    "several runs": """
loaders = [ps.prefetch(lambda: endless((256, 64)), S) for _ in range(3)]
its = [iter(loader) for loader in loaders for _ in range(2)]
for it in its: next(it)
""",
    "runs over blocked sources": """
its = [iter(ps.prefetch(blocked(), S)) for _ in range(4)]
for it in its: next(it)
""",
    "a blocked dataset": """
class Dataset:
    def __len__(self): return 100
    def __getitem__(self, i): return np.ones(8) if i == 0 else time.sleep(1000)
it = iter(ps.prefetch(Dataset(), S, workers=4)); next(it)
""",
    "a source whose close blocks": """
class Source:
    def __iter__(self): return self
    def __next__(self): return np.ones(8)
    def close(self): time.sleep(1000)
it = iter(ps.prefetch(Source(), S)); next(it)
""",
    "an async source": """
import asyncio
async def source():
    while True:
        await asyncio.sleep(0)
        yield np.ones((64, 64), np.float32)
it = iter(ps.prefetch(source(), S)); next(it)
""",
    "transforms on the host and on the devices": """
import jax.numpy as jnp
it = iter(ps.prefetch(endless((64, 64)), S, transform=lambda x: np.asarray(jnp.sin(x)), device_transform=lambda x: x + 1, workers=3))
next(it)
""",
    "a transform that is being compiled": """
tracing = threading.Event()
@jax.jit
def traced(x):
    tracing.set()
    time.sleep(3)
    return x
it = iter(ps.prefetch(endless(), S, transform=traced))
tracing.wait()
""",
    "a source that computes with JAX for a while": """
computing = threading.Event()
def source():
    x = jax.numpy.ones((64, 64))
    yield np.asarray(x)
    computing.set()
    end = time.monotonic() + 3
    while time.monotonic() < end: x = jax.numpy.tanh(x @ x) + 1
    yield np.asarray(x)
it = iter(ps.prefetch(source(), S)); next(it)
computing.wait()
""",
    "a consumer in a daemon thread": """
def consume():
    for batch in ps.prefetch(endless((64, 64)), S): pass
    print("the end of the program is not the end of the data")
threading.Thread(target=consume, daemon=True).start()
wait_until(loader_threads)
time.sleep(0.2)
""",
    "a consumer in a daemon thread that waits": """
it = iter(ps.prefetch(blocked(), S))
def consume():
    for batch in it: pass
    print("the end of the program is not the end of the data")
threading.Thread(target=consume, daemon=True).start()
wait_until(lambda: it.stats().batches == 1 and it.stats().ready.receivers_waiting)
""",
    "consumers in daemon threads that begin again and again": """
loader = ps.prefetch(lambda: (np.ones((256, 256), np.float32) for _ in range(20)), S)
def consume():
    while True:
        for batch in loader: pass
for _ in range(3): threading.Thread(target=consume, daemon=True).start()
time.sleep(0.3)
""",
    "an async consumer in a daemon thread": """
import asyncio
async def main():
    async for batch in ps.prefetch(endless((64, 64)), S): pass
    print("the end of the program is not the end of the data")
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
time.sleep(0.2)
""",
    "a consumer in a thread that is waited for": """
def consume():
    it = iter(ps.prefetch(endless((64, 64)), S))
    time.sleep(0.2)
    for _ in range(3): next(it)
threading.Thread(target=consume).start()
""",
}


@pytest.mark.parametrize("case", QUIET)
def test_the_program_ends_quietly(case: str, done: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    assert outcome(done(case)) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("case", QUIET)
def test_the_program_ends_quietly_every_time(case: str) -> None:
    assert [outcome(done) for done in runs(QUIET[case], 3)] == [(0, "", "")] * 3


@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["a run at module level", "large batches under way"])
def test_what_aborts_others_does_not_abort(case: str, times: int) -> None:
    """With daemon threads that nobody waits for, most of these runs end with code 134."""
    assert [outcome(done) for done in runs(QUIET[case], times)] == [(0, "", "")] * times


def test_threads_that_still_drop_batches_are_waited_for() -> None:
    """A run that was dropped ends by itself: its last thread lets go of its arrays, which is inside JAX."""
    program = """
import atexit
dropping = threading.Event()
clear = ps.running.run.Run._clear
def slowly(run):
    dropping.set()
    time.sleep(0.3)
    clear(run)
ps.running.run.Run._clear = slowly
atexit.unregister(ps.running.at_exit.close_all)
atexit.register(lambda: print(loader_threads()))
atexit.register(ps.running.at_exit.close_all)
it = iter(ps.prefetch(endless(), S)); next(it)
del it
dropping.wait()
"""
    assert outcome(run(program)) == (0, "[]\n", "")


def test_a_loader_made_after_the_end_says_so() -> None:
    program = """
import atexit
it = iter(ps.prefetch(endless(), S)); next(it)
# handlers run in the opposite order: this one as if it had been registered before the library's
atexit.unregister(ps.running.at_exit.close_all)
def late():
    for use in (lambda: next(it), lambda: iter(ps.prefetch(endless(), S))):
        try:
            use()
        except Exception as error:
            print(type(error).__name__)
atexit.register(late)
atexit.register(ps.running.at_exit.close_all)
"""
    assert outcome(run(program)) == (0, "StopIteration\nUsedUpError\n", "")


# --- errors

RAISES = {
    "in a function": """
def main():
    it = iter(ps.prefetch(endless(), depth=2))
    for batch in it: raise RuntimeError("boom")
main()
""",
    "at module level": """
it = iter(ps.prefetch(endless((1024, 256)), S))
for batch in it: raise RuntimeError("boom")
""",
    "in the source": """
def source():
    yield np.ones(8)
    raise RuntimeError("boom")
for batch in ps.prefetch(source(), S): pass
""",
    "in the transform, with a blocked source": """
def transform(x): raise RuntimeError("boom")
for batch in ps.prefetch(endless(), S, transform=transform): pass
""",
}


@pytest.mark.parametrize("case", RAISES)
def test_an_error_ends_the_program(case: str, done: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    """One traceback, and nothing beside it."""
    code, stdout, stderr = outcome(done(case))
    lines = stderr.splitlines()
    assert (code, stdout) == (1, "")
    assert "RuntimeError: boom" in lines
    assert lines.count("Traceback (most recent call last):") == 1
    assert all(line.startswith("prefetchshard: while ") for line in lines[lines.index("RuntimeError: boom") + 1 :])
    assert "Exception ignored" not in stderr


@pytest.mark.parametrize("where", ["module", "source"])
def test_sys_exit(where: str) -> None:
    program = {
        "module": "it = iter(ps.prefetch(endless((1024, 256)), S)); next(it); sys.exit(3)",
        "source": "def source():\n    yield np.ones(8)\n    sys.exit(3)\nfor batch in ps.prefetch(source(), S): pass",
    }[where]
    assert outcome(run(program)) == (3, "", "")


BLOCKED = {
    "in its own code": """
its = [iter(ps.prefetch(blocked(), S)) for _ in range(8)]
for it in its: next(it)
""",
    "in its destructor": """
class Source:
    def __iter__(self): return self
    def __next__(self):
        inside.set()
        dropped.wait()
        return np.ones(8)
    def __del__(self):
        print("transfer" not in threading.current_thread().name, flush=True)
        deleting.set()
        time.sleep(1000)
inside, dropped, deleting = (threading.Event() for _ in range(3))
it = iter(ps.prefetch(Source(), S))
inside.wait()
del it
dropped.set()
deleting.wait()
""",
    "below a function over trees": """
def source():
    yield np.ones(8)
    blocked_at.set()
    jax.tree.map(lambda leaf: time.sleep(1000), [1, 2])
blocked_at = threading.Event()
it = iter(ps.prefetch(source(), S)); next(it)
blocked_at.wait()
""",
}


@pytest.mark.parametrize("where", BLOCKED)
def test_a_blocked_source_holds_the_program_for_seconds_at_most(where: str) -> None:
    program = (
        BLOCKED[where]
        + """
import atexit
began = time.monotonic()
atexit.unregister(ps.running.at_exit.close_all)
atexit.register(lambda: print(time.monotonic() - began < 30))
atexit.register(ps.running.at_exit.close_all)
"""
    )
    done = run(program)
    assert (done.returncode, set(done.stdout.split()), done.stderr) == (0, {"True"}, "")


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("waits", ["threading.Event().wait()", "time.sleep(1000)"])
def test_a_daemon_thread_that_once_took_a_batch_does_not_delay_the_end(waits: str, is_closed: bool) -> None:
    """What waits for something else is not waited for: without that the program would not end in the time that it has here."""
    program = f"""
ps.running.before_3_14.CONSUMER_SECONDS = 1000.0
took = threading.Event()
def consume():
    it = iter(ps.prefetch(endless(), S))
    next(it)
    if {is_closed}: it.close()
    took.set()
    {waits}
threading.Thread(target=consume, daemon=True).start()
took.wait()
"""
    assert outcome(run(program)) == (0, "", "")


def test_a_daemon_thread_that_computes_between_two_batches_is_waited_for() -> None:
    program = """
import atexit
ps.running.before_3_14.CONSUMER_SECONDS = 1000.0  # it took its batch recently, however slow the machine is
def consume():
    for batch in ps.prefetch(endless(), S):
        took.set()
        ending.wait()
        end = time.monotonic() + 0.3
        while time.monotonic() < end: pass
        came.append(True)
took, ending, came = threading.Event(), threading.Event(), []
atexit.unregister(ps.running.at_exit.close_all)
atexit.register(lambda: print(came))
atexit.register(ps.running.at_exit.close_all)
atexit.register(ending.set)
threading.Thread(target=consume, daemon=True).start()
took.wait()
"""
    assert outcome(run(program)) == (0, "[True]\n", "")


def test_a_thread_may_take_its_first_batch_while_the_end_looks_who_took_one() -> None:
    """CPython 3.11 collects wherever something is made, and JAX has it run Python code then, so other threads go on there."""
    program = """
from prefetchshard.base.clock import MONOTONIC
from prefetchshard.running.before_3_14 import consumers, wait_for_consumers
class Takes:
    last_next_at = MONOTONIC()
def take(phase, info):
    consumers[-len(consumers)] = (Takes, None)
for _ in range(3000):
    take("", {})
gc.callbacks.append(take)
gc.set_threshold(1, 10, 10)
wait_for_consumers(())
gc.callbacks.remove(take)
"""
    assert outcome(run(program)) == (0, "", "")


# --- Ctrl-C


def test_ctrl_c_while_next_waits() -> None:
    """At once, and the program ends within seconds, as Python programs end then."""
    program = """
import atexit
it = iter(ps.prefetch(blocked(), S)); next(it)
sent = []
def send():
    wait_until(lambda: it.stats().ready.receivers_waiting)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
atexit.register(lambda: print(time.monotonic() - sent[0] < 30))  # the source would block for 1000
try:
    next(it)
finally:
    print(time.monotonic() - sent[0] < 30)
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "True\nTrue\n")
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1


def test_going_on_after_ctrl_c() -> None:
    program = """
def source():
    for i in range(4):
        turns[i].wait()
        yield np.full(8, i)
turns = [threading.Event() for _ in range(4)]
it = iter(ps.prefetch(source(), S))
got, interrupts = [], 0
def send():
    for i in range(4):
        for struck in range(2 * i + 1, 2 * i + 3):
            wait_until(lambda: it.stats().ready.receivers_waiting)
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: interrupts == struck)
        turns[i].set()
        wait_until(lambda: len(got) > i)
sender = threading.Thread(target=send, daemon=True); sender.start()
done = False
while not done:
    try:
        for batch in it: got.append(batch)
        done = True
    except KeyboardInterrupt:
        interrupts += 1
sender.join()
print([int(b[0]) for b in got], interrupts, it.position.step, it.stats().batches)
it.close()
print(loader_threads())
"""
    assert outcome(run(program)) == (0, "[0, 1, 2, 3] 8 3 4\n[]\n", "")


def test_closing_after_ctrl_c() -> None:
    program = """
it = iter(ps.prefetch(endless(), S))
try:
    for batch in it: os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print(loader_threads() != [])
it.close()
print(loader_threads())
"""
    assert outcome(run(program)) == (0, "True\n[]\n", "")


def test_ctrl_c_again_while_it_ends() -> None:
    """The user is impatient: the source is blocked, the transfers are under way. It must not abort."""
    program = """
import atexit
class Source:
    def __iter__(self): return self
    def __next__(self): return big
    def close(self): time.sleep(1000)
big = np.ones((1024, 9500), np.float32)
its = [iter(ps.prefetch(Source(), S)) for _ in range(2)]
for it in its: next(it)
ps.running.closing.GIVE_UP_SECONDS = 60.0
def send():
    for place in ("close_runs", "wait_outside_jax"):
        wait_until(lambda: main_is_in(place))
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send, daemon=True).start()
"""
    done = run(program)
    assert done.returncode == 0
    assert "KeyboardInterrupt" in done.stderr
    assert "Fatal" not in done.stderr


# --- development mode, forks


def test_development_mode_has_nothing_to_say() -> None:
    program = """
import subprocess
code = '''
import asyncio, logging, numpy as np, jax, prefetchshard as ps
# A callback of some tenths of a second is a slow machine; one of ten is a loop that was blocked
logging.getLogger("asyncio").addFilter(lambda record: "Executing" not in record.msg or record.args[1] >= 10)
def source():
    for i in range(4): yield np.full(8, i)
async def asource():
    for i in range(4): yield np.full(8, i)
for s in (source, source(), asource(), [np.ones(8)] * 3):
    for batch in ps.prefetch(s): pass
for s in (source, source(), asource(), [np.ones(8)] * 3):
    for batch in ps.prefetch(s): break
async def main():
    async with ps.prefetch(asource()) as loader:
        async for batch in loader: break
asyncio.run(main())
it = iter(ps.prefetch(asource())); next(it)
'''
done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", code], capture_output=True, text=True)
print(done.returncode, done.stdout, done.stderr)
"""
    assert outcome(run(program)) == (0, "0  \n", "")


FORK = """
import warnings
warnings.filterwarnings("ignore")
def in_child(use):
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            signal.alarm(20)
            use()
            code = 1
        except ps.UsedUpError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
loader = ps.prefetch(lambda: endless(), S)
it = iter(loader); next(it)
"""


def test_a_loader_in_a_forked_child_says_so() -> None:
    program = (
        FORK
        + """
import asyncio
async def a():
    await anext(it)
print([in_child(use) for use in (lambda: next(it), lambda: iter(loader), lambda: asyncio.run(a()), lambda: (it.close(), loader.close(), next(it)))])
next(it)
loader.close()
print(loader_threads())
"""
    )
    assert outcome(run(program)) == (0, "[0, 0, 0, 0]\n[]\n", "")


def test_a_forked_child_ends_although_it_holds_a_run() -> None:
    program = (
        FORK
        + """
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    it.close()
    loader.close()
    del it
    gc.collect()
    ps.running.at_exit.close_all()
    print("child", flush=True)
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), next(it).shape)
"""
    )
    done = run(program)
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["5 (8,)", ""]), done.stderr


def test_the_library_never_forks() -> None:
    program = """
def refuse(*args): raise AssertionError("forked")
os.fork = os.posix_spawn = refuse
print(len(list(ps.prefetch([np.ones(8)] * 4, S))))
"""
    assert outcome(run(program)) == (0, "4\n", "")
