"""The loader's state beside the model in one Orbax step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from resumes import Telling, frozen, take

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within Orbax
]


@pytest.fixture(scope="module")
def ocp() -> Any:
    return pytest.importorskip("orbax.checkpoint")


@pytest.fixture(scope="module")
def checkpoint(ocp: Any) -> Any:
    from prefetchshard import checkpoint

    return checkpoint


def make(S: NamedSharding, kind: str, state: ps.LoaderState | None = None) -> ps.Loader:
    rows = np.arange(640, dtype=np.int32).reshape(80, 8)
    source: dict[str, Any] = {"index": rows, "snapshot": Telling(list(rows)), "replay": iter(list(rows))}
    return ps.Loader(source[kind], S, batch_size=8, shuffle=kind == "index", state=state)


@pytest.mark.parametrize("kind", ["index", "snapshot", "replay"])
@pytest.mark.parametrize("waits", [False, True])
def test_one_step_holds_model_and_input(kind: str, waits: bool, S: NamedSharding, ocp: Any, checkpoint: Any, tmp_path: Path) -> None:
    whole = take(iter(make(S, kind)))
    batches = iter(make(S, kind))
    total = jnp.zeros(8, jnp.int32)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=not waits, max_to_keep=2)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step, batch in zip(range(1, 7), batches, strict=False):
            total = total + batch.sum(0)
            state = batches.state()
            args = ocp.args.Composite(model=ocp.args.StandardSave({"total": total}), input=checkpoint.PrefetchshardSave(state))
            assert manager.save(step, args=args)
        manager.wait_until_finished()
    batches.close()

    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        assert manager.latest_step() == 6
        for step in (5, 6):
            args = ocp.args.Composite(
                model=ocp.args.StandardRestore({"total": jnp.zeros(8, jnp.int32)}), input=checkpoint.PrefetchshardRestore()
            )
            saved = manager.restore(step, args=args)
            assert isinstance(saved.input, ps.LoaderState)
            assert (saved.input.step, saved.input.resumes_by) == (step, kind)
            assert take(iter(make(S, kind, saved.input))) == whole[step:]
        assert frozen(saved.model["total"]) == frozen(total)


def test_the_input_is_restored_by_itself(ocp: Any, checkpoint: Any, S: NamedSharding, tmp_path: Path) -> None:
    state = make(S, "index").state()
    with ocp.Checkpointer(checkpoint.PrefetchshardHandler()) as checkpointer:
        checkpointer.save(tmp_path / "input", args=checkpoint.PrefetchshardSave(state))
        assert checkpointer.restore(tmp_path / "input", args=checkpoint.PrefetchshardRestore()) == state
        assert checkpointer.restore(tmp_path / "input") == state


def test_damage_and_absence_are_named(checkpoint: Any, S: NamedSharding, tmp_path: Path) -> None:
    handler = checkpoint.PrefetchshardHandler()
    with pytest.raises(FileNotFoundError, match="no state of a prefetchshard loader"):
        handler.restore(tmp_path)
    handler.save(tmp_path, args=checkpoint.PrefetchshardSave(make(S, "index").state()))
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ps.StateError, match=f"{file}.*checksum"):
        handler.restore(tmp_path)


@pytest.mark.parametrize("junk", [b"PFSt", None, {"junk": 1}])
def test_what_is_no_state_is_refused(junk: Any, checkpoint: Any) -> None:
    with pytest.raises(ps.ConfigError, match="takes a LoaderState"):
        checkpoint.PrefetchshardSave(junk)


def test_only_the_primary_process_writes_what_is_the_same_in_all(
    checkpoint: Any, S: NamedSharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make(S, "index").state()
    loader = make(S, "snapshot")
    batches = iter(loader)
    next(batches)
    own = batches.state()
    batches.close()
    handler = checkpoint.PrefetchshardHandler()
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda *_, process=process: process)
        monkeypatch.setattr(checkpoint.ocp.multihost, "is_primary_host", lambda host, process=process: process == host)
        handler.save(tmp_path, args=checkpoint.PrefetchshardSave(index))
        assert [file.name for file in tmp_path.iterdir()] == ([] if process else ["state"])
    assert handler.restore(tmp_path) == index
    (tmp_path / "state").unlink()
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda *_, process=process: process)
        handler.save(tmp_path, args=checkpoint.PrefetchshardSave(own))
        assert handler.restore(tmp_path) == own
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(jax, "process_count", lambda *_: 3)
    with pytest.raises(ps.StateError, match="saved by other processes"):
        handler.restore(tmp_path)
