"""What cannot work, as far as source, sharding and settings tell it together, before anything is read."""

from __future__ import annotations

from prefetchshard.base.config import MOST_ROWS, PerDevice, Settings
from prefetchshard.base.errors import ConfigError
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.sources import Source


def global_rows(settings: Settings, rules: ShardingRules) -> int | None:
    """Global rows of a batch; None where the source makes the batches.

    Raises:
        ConfigError: `ps.PerDevice` with a sharding that is known only with the batch.
    """
    size = settings.batch_size
    if not isinstance(size, PerDevice):
        return size
    split = rules.batch_split()
    if split is None:
        raise ConfigError("ps.PerDevice needs a sharding that is known here; with a callable sharding give batch_size as a number")
    rows = size.rows * split
    if rows > MOST_ROWS:
        raise ConfigError(f"batch_size={size!r}: {rows} rows over {split} devices, and a batch has at most {MOST_ROWS}")
    return rows


def check_source(source: Source, settings: Settings) -> None:
    """Whether a source of this kind can be read as asked.

    Raises:
        ConfigError: it cannot; says the way out.
    """
    function = "transform" if settings.transform is not None else "collate" if settings.collate is not None else None
    if source.stays_on_devices and function is not None:
        raise ConfigError(
            f"{function} runs on the host, and the rows of ps.OnDevice never come there: use device_transform, or pass the arrays themselves"
        )
    if source.is_numbered is True:
        return
    if settings.shuffle:
        raise ConfigError(
            "shuffle=True needs random access (arrays, or a dataset with __len__ and __getitem__), and the source is "
            f"{'an ' if source.kind[0] in 'aeiou' else 'a '}{source.kind}; shuffle in the source, or pass a dataset"
        )
    if source.one_shot and settings.epochs != 1:
        raise ConfigError(
            f"epochs={settings.epochs} over a one-shot iterator, which can be read once: pass a function that makes a new one each epoch"
        )


def check_rows(rules: ShardingRules, settings: Settings, batch_size: int | None) -> None:
    """Whether batches of so many rows can be cut as asked.

    Raises:
        ConfigError: they cannot; gives the numbers.
    """
    split, k = rules.batch_split(), settings.microbatches or 1
    if batch_size is None or settings.collate is not None:
        return
    if batch_size % k:
        raise ConfigError(f"microbatches={k}: batch_size={batch_size} cannot be cut into {k} equal pieces")
    if split is not None and (batch_size // k) % split:
        pieces = f"each of the {k} microbatches has {batch_size // k} rows" if k > 1 else f"batch_size={batch_size}"
        raise ConfigError(f"{pieces}, and the sharding {rules} cuts the rows into {split}: use a multiple of {split * k}")


def check_last_rows(what: str, last: int, settings: Settings, rules: ShardingRules, batch_size: int) -> None:
    """Whether a last batch of so many rows, fewer than `batch_size`, can be as asked; `what` has it.

    Raises:
        ConfigError: it cannot; gives the numbers and the ways out.
    """
    where = f"{what}, no multiple of batch_size={batch_size}"
    ways = "drop it (remainder='drop') or fill it up under a mask (remainder='pad')"
    if settings.policy == "error":
        raise ConfigError(f"{where}, and remainder='error': the last batch would have {last}; {ways}")
    multiple = (rules.batch_split() or 1) * (settings.microbatches or 1)
    if settings.policy == "keep" and settings.collate is None and last % multiple:
        raise ConfigError(
            f"{where}, and remainder='keep': the last batch would have {last}, and the sharding {rules} needs a multiple of {multiple}; {ways}"
        )


def check_endless(source: Source, settings: Settings, order: EpochOrder | None) -> None:
    """Whether arrays make a batch at all, where they are to be read for ever.

    Raises:
        ConfigError: they do not.
    """
    if source.is_memory and settings.epochs is None and (order is None or order.steps() == 0):
        raise ConfigError(f"the source has {source.length} rows, fewer than a batch, and epochs=None would go on without one for ever")
