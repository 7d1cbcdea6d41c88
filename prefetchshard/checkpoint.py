"""The state of a loader beside the model in one step of an Orbax `CheckpointManager`. Needs the extra `orbax`.

    from prefetchshard.checkpoint import PrefetchshardRestore, PrefetchshardSave

    manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(params), input=PrefetchshardSave(batches.state())))
    ...
    saved = manager.restore(step, args=ocp.args.Composite(model=ocp.args.StandardRestore(params), input=PrefetchshardRestore()))
    loader = ps.Loader(..., state=saved.input)

The state is taken where `PrefetchshardSave` is made, written before `save` returns, and kept only if the whole step is.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUntypedClassDecorator=false, reportUnknownArgumentType=false
# What is unknown here is what Orbax leaves without types, and all of it where Orbax is not installed.

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp

from prefetchshard.base.errors import ConfigError, StateError
from prefetchshard.resuming.loader_state import LoaderState

_COMMON = "state"


class PrefetchshardHandler(ocp.CheckpointHandler):
    """Writes a `LoaderState` into the folder of a checkpoint, and reads it.

    A state that says where rows are by number is the same in every process: the primary one writes it. Others hold what the source of
    their process said, and each process writes and reads its own.

    Args:
        primary_host: the process that writes what is the same in all; None: each of them does, into folders of their own.

    Example:
        import orbax.checkpoint as ocp
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add("input", PrefetchshardSave, PrefetchshardHandler(primary_host=0))
        handlers.add("input", PrefetchshardRestore, PrefetchshardHandler(primary_host=0))
    """

    def __init__(self, primary_host: int | None = 0) -> None:
        self._primary_host = primary_host

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write `args.item`, at once."""
        del args
        state = kwargs["args"].item
        if state.resumes_by != "index" and jax.process_count() > 1:
            (directory / _own_name()).write_bytes(state.encode())
        elif self._primary_host is None or ocp.multihost.is_primary_host(self._primary_host):
            (directory / _COMMON).write_bytes(state.encode())

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> LoaderState:
        """Read what was saved.

        Raises:
            StateError: it is damaged, of a newer version, or was saved by another number of processes, each with a source of its own.
            FileNotFoundError: no state was saved here.
        """
        del args, kwargs
        for name in (_COMMON, _own_name()):
            file = directory / name
            if file.exists():
                try:
                    return LoaderState.decode(file.read_bytes())
                except StateError as error:
                    raise StateError(f"{file}: {error}") from error
        others = sorted(file.name for file in directory.iterdir() if file.name.startswith(f"{_COMMON}-"))
        if others:
            raise StateError(
                f"{directory}: saved by other processes, each with the state of its own source ({', '.join(others[:3])}), not by process "
                f"{jax.process_index()} of {jax.process_count()}"
            )
        raise FileNotFoundError(f"{directory}: no state of a prefetchshard loader was saved here")


@ocp.args.register_with_handler(PrefetchshardHandler, for_save=True)
@dataclasses.dataclass
class PrefetchshardSave(ocp.args.CheckpointArgs):
    """Saves a state.

    Args:
        item: `loader.state()`, or that of one of its iterators.

    Raises:
        ConfigError: it is no `LoaderState`.

    Example:
        batches = iter(ps.Loader(np.zeros((64, 3), np.float32), batch_size=16))
        args = PrefetchshardSave(batches.state())  # for `ocp.args.Composite(model=..., input=args)`
    """

    item: LoaderState

    def __post_init__(self) -> None:
        if not isinstance(self.item, LoaderState):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise ConfigError(f"PrefetchshardSave takes a LoaderState, loader.state(), not {type(self.item).__qualname__}")


@ocp.args.register_with_handler(PrefetchshardHandler, for_restore=True)
@dataclasses.dataclass
class PrefetchshardRestore(ocp.args.CheckpointArgs):
    """Restores a `LoaderState`.

    Args:
        item: not used; Orbax passes it along.

    Example:
        args = PrefetchshardRestore()  # for `ocp.args.Composite(model=..., input=args)`
    """

    item: Any = None


def _own_name() -> str:
    return f"{_COMMON}-{jax.process_index()}-of-{jax.process_count()}"
