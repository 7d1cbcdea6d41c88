"""Statistics as scalars for TensorBoard, by any writer. Needs no package: the writer is the user's."""

from __future__ import annotations

from typing import Any

from prefetchshard.base.errors import ConfigError
from prefetchshard.measuring.shares import shares_of
from prefetchshard.measuring.stats import Stats


def log_scalars(writer: Any, stats: Stats, step: int, *, prefix: str = "prefetchshard/") -> None:
    """Write what a loop depends on as scalars, as TensorBoard shows them. Nothing, where no batch was handed out.

    Args:
        writer: has `add_scalar(tag, value, step)` (those of torch and tensorboardX), `scalar(tag, value, step)` (that of Flax), or
            `write_scalars(step, scalars)` (those of CLU).
        stats: `stats(last_seconds=...)` shows how a loop changes, `stats()` all of the run.
        step: of the training.
        prefix: of every tag.

    Raises:
        ConfigError: the writer has none of these methods.

    Example:
        from prefetchshard.exporting.scalars import log_scalars
        import types
        written = {}
        writer = types.SimpleNamespace(write_scalars=lambda step, scalars: written.update(scalars))
        list(loader := ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
        log_scalars(writer, loader.stats(), step=4)
    """
    scalars = {f"{prefix}{name}": value for name, value in scalars_of(stats).items()}
    if hasattr(writer, "write_scalars"):
        if scalars:
            writer.write_scalars(step, scalars)
        return
    write = getattr(writer, "add_scalar", None) or getattr(writer, "scalar", None)
    if write is None:
        raise ConfigError(f"the writer, a {type(writer).__qualname__}, has none of the methods add_scalar, scalar and write_scalars")
    for name, value in scalars.items():
        write(name, value, step)


def scalars_of(stats: Stats) -> dict[str, float]:
    """The numbers that tell what a loop depends on, seconds in names that say so; empty where no batch was handed out."""
    if not stats.batches:
        return {}
    verdict = stats.verdict
    return {
        "steps_per_second": stats.batches / stats.wall_seconds if stats.wall_seconds else 0.0,
        "rows_per_second": stats.rows_per_second,
        "bytes_per_second": stats.bytes_per_second,
        "lost_share": verdict.lost_share,
        "possible_gain": verdict.possible_gain,
        "next_seconds/mean": stats.next.mean,
        "next_seconds/p50": stats.next.p50,
        "next_seconds/p99": stats.next.p99,
        "step_seconds/mean": stats.step.mean,
        **{f"time_share/{name.replace(' ', '_')}": share for name, share in shares_of(stats).items()},
        "ready_batches": stats.mean_ready,
        "read_batches": stats.mean_read,
        "reader_threads": float(stats.workers),
    }
