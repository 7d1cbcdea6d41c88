"""What goes wrong, by kind. Every error of the library is also the standard error that a caller would expect.

```
PrefetchError
├── ConfigError         (ValueError)     the settings cannot work; raised where the loader is made
│   └── ArgumentError   (TypeError too)  an argument that is not there, or a value in the place of another one
├── SourceError         (RuntimeError)   the source broke its contract, or raised what would be read as control flow
├── BatchError          (ValueError)     examples do not stack into a batch; names leaf and row
├── PlacementError      (ValueError)     a batch does not fit its sharding
├── LeafTypeError       (TypeError)      a leaf that no device can hold; names leaf, dtype and the way out
├── NarrowingError      (OverflowError)  a 64-bit value that does not survive while x64 is off
├── UsedUpError         (RuntimeError)   a one-shot source was read before, or a loader was carried into a fork
└── StateError          (ValueError)     a state that is damaged, foreign or does not fit this loader or its source

PrefetchWarning         (RuntimeWarning) something to know that does not stop the run
└── StuckThreadWarning                   a thread sat in the source's own code when its run was closed
```

What a source, transform or collate raises is never wrapped: the consumer gets that very object, with notes that say where it
happened. `SourceError` stands in only for what Python would take for control flow (`StopIteration`, `StopAsyncIteration`,
`GeneratorExit`, a cancellation), raised where it cannot mean that.
"""

from __future__ import annotations

from typing import Any


class PrefetchError(Exception):
    """The base of every error that this library raises by itself.

    Example:
        try:
            ps.Loader(np.zeros((64, 3)), batch_size=-1)
        except ps.PrefetchError as error:
            print(error)
        raise ps.PrefetchError("every error below is one too")
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own calls the class with `args`, which are the finished text and need not be what `__init__` takes
        return _restored, (type(self), self.args), self.__dict__ or None


def _restored(kind: type[PrefetchError], args: tuple[Any, ...]) -> PrefetchError:
    return kind.__new__(kind, *args)


class ConfigError(PrefetchError, ValueError):
    """The settings cannot work; the text names the argument, the value and the way out.

    Example:
        ps.Loader(np.zeros((64, 3)), batch_size=-1)
    """


class ArgumentError(ConfigError, TypeError):
    """An argument that a loader does not have, or a value in the place of another argument; the text says what to write.

    Example:
        ps.Loader(np.zeros((64, 3)), batch_size=8, num_workers=4)
    """


class SourceError(PrefetchError, RuntimeError):
    """The source broke its contract, or raised what would be read as control flow; see `__cause__`.

    Example:
        list(ps.prefetch([np.ones(8, np.float32)], P("data"), transform=lambda batch: None))
    """


class BatchError(PrefetchError, ValueError):
    """Examples do not stack, or a batch is not what the first batch was.

    Example:
        rows = [np.ones(i, np.float32) for i in range(8)]
        list(ps.Loader(rows, P("data"), batch_size=8))
    """


class PlacementError(PrefetchError, ValueError):
    """A batch does not fit its sharding; the text names leaf, shape, spec, mesh and the way out.

    Example:
        list(ps.prefetch([np.ones((7, 3), np.float32)], P("data")))
    """


class LeafTypeError(PrefetchError, TypeError):
    """A leaf that no device can hold (text, objects, dates, structured or masked arrays).

    Example:
        list(ps.prefetch([np.array(["text"] * 8)], P("data")))
    """

    def __init__(self, path: str, what: str, advice: str | None = None) -> None:
        advice = advice or f"keep it on the host ({_host(path)}), encode it in `transform`, or leave it out"
        super().__init__(f"leaf {path or '(the batch itself)'}: {what} cannot be put on a device; {advice}")


def _host(path: str) -> str:
    return f"host=({path!r},), or ps.HOST in its place of `sharding=`" if path else "sharding=ps.HOST"


class NarrowingError(PrefetchError, OverflowError):
    """A 64-bit value that would not survive the conversion to 32 bits which JAX makes while x64 is off.

    Attributes:
        row: of the batch; None where the leaf has no rows.

    Example:
        list(ps.prefetch([np.full(8, 2**40)], P("data")))
    """

    row: int | None = None


class UsedUpError(PrefetchError, RuntimeError):
    """A one-shot source was read before, or the loader was carried into another process.

    Example:
        loader = ps.Loader(iter([np.ones(8, np.float32)]), P("data"))
        list(loader)
        list(loader)
    """


class StateError(PrefetchError, ValueError):
    """A state that is damaged, foreign, newer than this library, or does not fit this loader or its source.

    Example:
        ps.LoaderState.decode(b"not a state")
    """


class PrefetchWarning(RuntimeWarning):
    """Something to know that does not stop the run.

    Example:
        import warnings
        warnings.simplefilter("error", ps.PrefetchWarning)  # whatever the loader warns of is an error from here on
        warnings.warn("what the loader would say", ps.PrefetchWarning)
    """


class StuckThreadWarning(PrefetchWarning):
    """A thread sat in the source's own code when its run was closed, and was given up on.

    What to do: give the source's own waits a timeout, so that it comes back after its run was closed.
    """
