"""Arguments that do not fit a loader, told with those that do: the names of other libraries, misspelt names, values in the wrong place.

Nothing here runs unless the arguments of a call do not fit.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

import numpy as np

from prefetchshard.base.config import Pad, PerDevice
from prefetchshard.base.errors import ArgumentError
from prefetchshard.resuming.loader_state import LoaderState

Init = TypeVar("Init", bound=Callable[..., None])
Hint: TypeAlias = str | Callable[[Any], str]
"""What to write in place of an argument; `{}` stands for the value that was given."""


def explained(init: Init) -> Init:
    """For an `__init__`: a call that does not fit its signature raises `ArgumentError`, which says what to write."""

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **options: Any) -> None:
        try:
            init(self, *values, **options)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it was raised inside
                raise
            raise _unfit(inspect.signature(init), values, options) or error from None

    return cast("Init", checked)


def refuse_as_sharding(value: object) -> None:
    """Refuse what was meant for another argument, and came to `sharding` because that is the second one.

    Raises:
        ArgumentError: says where it belongs.
    """
    meant = _meant(value)
    if meant is None and _is_array(value):
        raise ArgumentError(
            f"sharding: an array of shape {getattr(value, 'shape', ())} is no sharding; arrays of one source go together, ps.Loader((x, y), ...)"
        )
    if meant is not None:
        raise ArgumentError(f"sharding={value!r} is no sharding: write {meant}")


def _unfit(signature: inspect.Signature, values: Sequence[object], options: Mapping[str, object]) -> ArgumentError | None:
    """What is wrong with a call, in words; None if nothing is found."""
    parameters = list(signature.parameters.values())[1:]  # without `self`
    names = [parameter.name for parameter in parameters]
    by_position = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    unknown = [(name, value) for name, value in options.items() if name not in names]
    if unknown:
        hints = [f"{name}={_shown(value)}: {hint_for(name, value, names)}" for name, value in unknown]
        if len(hints) == 1:
            name, hint = unknown[0][0], hints[0].partition(": ")[2]
            return ArgumentError(f"Loader has no argument {name!r}: {hint}")
        return ArgumentError("\n  ".join([f"Loader has no arguments {', '.join(repr(name) for name, _ in unknown)}:", *hints]))
    if len(values) > len(by_position):
        meant = [text for text in map(_meant, values[1:]) if text]
        hint = f": write {', '.join(meant)}" if meant else ": the others need their names"
        return ArgumentError(f"Loader takes {' and '.join(by_position)} by position, and got {len(values)} values{hint}")
    twice = [name for name in by_position[: len(values)] if name in options]
    if twice:
        return ArgumentError(f"Loader got {twice[0]} twice, by position and by name: leave one out")
    if not values and "source" not in options:
        return ArgumentError("Loader needs a source: arrays, a dataset, an iterable, or a function that returns one, as its first argument")
    return None


def hint_for(name: str, value: object, names: Sequence[str]) -> str:
    """What to write in place of an argument that is not there.

    Args:
        name: of the argument.
        value: that was given.
        names: of the arguments that there are.
    """
    found = OTHERS.get(name)
    if found is None:
        plain = name.lower().strip("_")
        near = difflib.get_close_matches(plain, [*names, *OTHERS], n=1, cutoff=0.75)
        if not near:
            return f"its arguments are {', '.join(names)}"
        if near[0] in names:
            return f"did you mean {near[0]}={_shown(value)}?"
        found = OTHERS[near[0]]
    return found(value) if callable(found) else found.replace("{}", _shown(value))


def _meant(value: object) -> str | None:
    """The argument that such a value is most often meant for."""
    if isinstance(value, bool):
        return f"shuffle={value}"
    if isinstance(value, numbers.Integral):
        return f"batch_size={int(value)} for the rows of a step, or depth={int(value)} for the batches kept ready"
    if isinstance(value, PerDevice):
        return f"batch_size=ps.PerDevice({value.rows})"
    if isinstance(value, Pad) or (isinstance(value, str) and value in ("drop", "keep", "pad")):
        return f"remainder={value!r}"
    if isinstance(value, LoaderState):
        return "state=..."
    return None


def _is_array(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype")


def _shown(value: object) -> str:
    """Numbers and short texts as they are written, other values as `...`."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else "..."
    return "..."


# ------------------------------------------------------------------------------------- what needs a look at the value


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) > 0


def _is_zero(value: object) -> bool:
    """Whether it is 0 or False."""
    return isinstance(value, numbers.Integral | np.bool_) and not value


def _workers(value: object) -> str:
    if _is_zero(value) and not isinstance(value, bool):
        return "write workers=1, one thread reads ahead of the loop"
    if not _is_count(value):
        return 'leave it out: workers="auto" chooses by the CPUs'
    return f"write workers={value}, threads of this process, or workers=ps.Processes({value}), worker processes"


def _drops(value: object) -> str:
    return _KEEP if _is_zero(value) else _DROP


def _keeps(value: object) -> str:
    return _DROP if _is_zero(value) else _KEEP


_DROP = 'write remainder="drop"'
_KEEP = 'write remainder="keep", and a short last batch comes as it is, or remainder="pad", and it is filled up and masked'


def _epochs(value: object) -> str:
    if _is_zero(value):
        return "leave it out: the source is read once"
    if _is_count(value):
        return f"write epochs={value}"
    return "write epochs=None, for ever"


def _steps(value: object) -> str:
    return f"leave it out: itertools.islice(loader, {_shown(value)}) gives so many batches"


def _prefetch(value: object) -> str:
    return f"write depth={value}, batches ready on the devices" if _is_count(value) else "leave it out: two batches are kept ready, depth=2"


# --------------------------------------------------------------------------------------------------------- the table


def _table(*rows: tuple[str, Hint]) -> dict[str, Hint]:
    return {name: hint for names, hint in rows for name in names.split()}


_READER = "leave it out: it belongs to the source, which is made before it is passed"
_SHARD = "leave it out: ps.process_data_shard(mesh, spec) says which rows this process reads"
_STREAM_ORDER = "for another order index the dataset by it, or pass an iterator that yields examples in that order"

OTHERS: Final[dict[str, Hint]] = _table(
    (
        "dataset data data_source source_data iterator iterable loader dataloader src ds arrays inputs train_dataset",
        "write it as the first value, ps.Loader(source, ...)",
    ),
    ("num_workers worker_count num_threads num_parallel_calls num_proc concurrency max_workers n_jobs threads", _workers),
    ("dataloader_num_workers num_reader_threads cycle_length parallelism", _workers),
    ("prefetch prefetch_size prefetch_buffer_size prefetch_batches prefetch_depth num_prefetch device_buffer_size", _prefetch),
    ("queue_size max_queue_size queue_depth lookahead batches_ahead size", _prefetch),
    ("prefetch_factor dataloader_prefetch_factor", "write depth={}, batches ready on the devices, not for each worker"),
    ("buffer_size", "write depth={} for the batches kept ready; a shuffle needs no buffer, shuffle=True"),
    (
        "shuffle_buffer_size shuffle_buffer shuffle_size bufsize shuffle_window window_size",
        "write shuffle=True, it needs no buffer, but random access; a stream is shuffled in the source",
    ),
    ("reshuffle_each_iteration reseed_each_epoch reshuffle", "leave it out: with shuffle=True each epoch has an order of its own"),
    ("cpu_buffer_size worker_buffer_size host_buffer_size", 'leave it out: host_memory="1GiB" bounds what is read ahead'),
    ("memory_limit max_memory ram_budget memory_budget memory", 'write host_memory={} or device_memory={}, such as "2GiB"'),
    ("drop_last drop_remainder drop_last_batch dataloader_drop_last drop", _drops),
    ("partial allow_smaller_final_batch keep_last keep_remainder", _keeps),
    ("pad pad_last pad_final_batch pad_remainder", 'write remainder="pad"'),
    ("mask mask_key mask_name", "write remainder=ps.Pad(mask_key={})"),
    ("pad_value padding_value fill_value", "write remainder=ps.Pad(value={})"),
    ("padding_values padded_shapes padding", "write collate=..., a function that makes a batch of one shape from a list of examples"),
    ("collate_fn collator collation_fn data_collator batch_fn aggregator", "write collate={}"),
    ("sampler samplers", f"leave it out: shuffle=True is torch's RandomSampler; {_STREAM_ORDER}"),
    ("batch_sampler", "leave it out: pass an iterator that yields the batches in that order, without batch_size"),
    ("replacement num_samples", f"leave it out: every row comes once an epoch; {_STREAM_ORDER}"),
    (
        "pin_memory pin_memory_device dataloader_pin_memory non_blocking",
        "leave it out: accelerators always read from page-locked memory, where that is faster, and while the step runs",
    ),
    ("persistent_workers", "leave it out: one run over epochs=n keeps its threads for all n epochs"),
    (
        "worker_init_fn worker_init",
        "leave it out: ps.per_worker(make_dataset) is an instance a worker, made in its thread or process",
    ),
    (
        "multiprocessing_context multiprocessing_options mp_context mp_ctx use_multiprocessing workers_type",
        "leave it out: workers are threads; workers=ps.Processes(n) spawns worker processes, and never forks",
    ),
    (
        "generator random_state random_seed rng shuffle_seed rng_seed manual_seed",
        "write seed=..., an integer; the order follows from it and the epoch",
    ),
    ("key", "write seed=..., an integer; `device_transform` gets a key made from it where it has a parameter `key`"),
    (
        "timeout timeout_s",
        "leave it out: next() has no deadline; stall_warning_seconds={} says in the log what it waits for, and the source's own waits can have one",
    ),
    ("in_order deterministic output_order sloppy ordered", "leave it out: batches always come in the order of the source"),
    ("snapshot_every_n_steps checkpoint_every", "write snapshot_every={}"),
    ("num_epochs n_epochs max_epochs num_train_epochs repeat repeats infinite loop cycle", _epochs),
    ("max_steps num_steps n_steps steps total_steps steps_per_epoch num_batches max_batches limit take stop_after", _steps),
    (
        "skip start_step initial_step start_epoch initial_epoch skip_steps skip_batches offset",
        "leave it out: state=... goes on where a loader stood",
    ),
    ("checkpoint resume resume_from state_dict load_state_dict initial_state restore", "write state=..., what state() of a loader gave"),
    ("batch batchsize bs global_batch_size train_batch_size num_items", "write batch_size={}, rows over all devices"),
    ("batch_size_per_device per_device_batch_size per_device_train_batch_size device_batch_size", "write batch_size=ps.PerDevice({})"),
    ("batched", "leave it out: `transform` gets one example where there is a batch_size, else a whole batch"),
    ("device", "write sharding=jax.sharding.SingleDeviceSharding(device)"),
    ("devices", 'write sharding=jax.sharding.Mesh(devices, ("data",))'),
    ("mesh axis axis_name axes spec partition_spec pspec batch_axis data_axis", 'write sharding=NamedSharding(mesh, P("data"))'),
    (
        "shardings in_shardings out_shardings data_sharding device_put placement layout to_device transfer_fn",
        "write sharding=..., where each leaf goes",
    ),
    (
        "transforms transform_fn map map_fn map_func function operations transformations preprocess preprocessor preprocess_fn augment op",
        "write transform=..., one function of one example (of a batch, without batch_size)",
    ),
    ("target_transform", "write transform=..., one function of a whole example, its target included"),
    ("filter filter_fn predicate", "leave it out: leave examples out in the source, such as in a generator"),
    ("device_map postprocess jit_transform", "write device_transform=..., a function of a batch, jitted, on the devices"),
    (
        "gradient_accumulation_steps accumulation_steps accumulate_steps grad_accum_steps grad_accum accum_steps num_microbatches n_microbatches",
        "write microbatches={}",
    ),
    ("microbatch_size micro_batch_size", "write microbatches=..., their number, batch_size divided by {}"),
    ("read_options", "leave it out: workers=... threads read, and depth=... batches are kept ready"),
    ("shard_options num_shards num_replicas rank world_size shard_index shard_id process_index process_count split_by_node", _SHARD),
    ("dtype dtypes", "leave it out: leaves keep their dtype; `device_transform` changes it on the devices"),
    ("cache keep_in_memory cache_in_memory", "leave it out: ps.OnDevice(arrays) keeps arrays on the devices"),
    ("enable_profiling profile verbose progress report_stats_interval", "leave it out: print(loader.stats()) says what the loop waits for"),
    (
        "max_failures ignore_errors skip_errors handler on_error errors",
        "leave it out: an error in the source comes after all good batches; catch it in the source or in `transform`",
    ),
    ("streaming split columns remove_columns input_columns with_indices urls shardshuffle", _READER),
    ("keep_on_host keep_on_cpu host_keys", 'write host=("text", ...), the paths of the leaves that stay on the host'),
    ("copy copy_data", "write reuses_buffers=False if the source never writes again to what it yielded"),
)
"""By name: what torch, tf.data, Grain, Hugging Face, SPDL, flax and others call it."""
