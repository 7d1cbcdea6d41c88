"""The demonstration: a small convolutional network learns scikit-learn's handwritten digits over a mesh of devices.

It is written as a user would write it, against the public names alone. `train` and `train_async` are the same loop in its two
spellings; everything that they share is in `Job`.
"""

# What is unknown here is what JAX, optax and scikit-learn leave without types.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits

import prefetchshard as ps

VIRTUAL_DEVICES = 8
HELD_OUT_SHARE = 0.2
HIDDEN = 128
LEARNING_RATE = 4e-3
SAVE_EVERY_STEPS = 25
ENOUGH = 0.95
"""The held-out accuracy below which the demonstration counts as failed."""

Rows = dict[str, NDArray[Any]]
Batch = dict[str, jax.Array]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line may choose; see `python -m prefetchshard demo --help`."""

    mesh: dict[str, int] = msgspec.field(default_factory=lambda: {"data": -1})
    epochs: int = 20
    batch_size: int = 64
    seed: int = 0
    use_async: bool = False
    backend: str = "asyncio"
    checkpoint: Path | None = None
    checkpoint_every: int = SAVE_EVERY_STEPS


class TrainState(NamedTuple):
    """All that a training step changes."""

    parameters: dict[str, jax.Array]
    optimizer: optax.OptState


# ------------------------------------------------------------------------------------------------------------- the data


def digits(seed: int) -> tuple[Rows, Rows]:
    """The rows to learn from and the rows held out: `image` uint8 (rows, height, width, 1), `label` int32 (rows,).

    Images to learn from are 10 x 10, the digit with a rim of one empty pixel, for `crop` to cut from; held-out ones are 8 x 8.
    """
    data: Any = load_digits()
    images = data.images.astype(np.uint8)[..., None]
    labels = data.target.astype(np.int32)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    held_out, learn = np.split(shuffled, [int(len(labels) * HELD_OUT_SHARE)])
    framed = np.pad(images[learn], ((0, 0), (1, 1), (1, 1), (0, 0)))
    return {"image": framed, "label": labels[learn]}, {"image": images[held_out], "label": labels[held_out]}


def crop(example: Rows, rng: np.random.Generator) -> Rows:
    """Cuts 8 x 8 pixels out of one example, at a random place: the digit moves by up to one pixel."""
    top, left = rng.integers(0, 3, size=2)
    return {**example, "image": example["image"][top : top + 8, left : left + 8]}


def to_float(batch: Batch) -> Batch:
    """Runs on the devices: bytes are what travels, floats are what the network reads."""
    return {**batch, "image": batch["image"].astype(jnp.float32) / 16.0}


# ---------------------------------------------------------------------------------------------------------- the network


def new_parameters(seed: int) -> dict[str, jax.Array]:
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "hidden": (1024, HIDDEN), "out": (HIDDEN, 10)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    parameters: dict[str, jax.Array] = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        parameters[name] = jax.random.normal(key, shape) * np.sqrt(2.0 / np.prod(shape[:-1]))
        parameters[f"{name}_bias"] = jnp.zeros(shape[-1])
    return parameters


def logits(parameters: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Images (rows, 8, 8, 1) to scores (rows, 10)."""
    x = images
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = jax.lax.conv_general_dilated(x, parameters[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + parameters[f"{name}_bias"])
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ parameters["hidden"] + parameters["hidden_bias"])
    return x @ parameters["out"] + parameters["out_bias"]


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where each leaf of a training state lives: the dense layers split over the axis `model`, if there is one; else replicated."""
    split = {"hidden": PartitionSpec(None, "model"), "hidden_bias": PartitionSpec("model"), "out": PartitionSpec("model", None)}

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None) if "model" in mesh.axis_names else None
        return NamedSharding(mesh, split.get(str(name), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


# --------------------------------------------------------------------------------------------------------- the checkpoint


class Saved(NamedTuple):
    """All that is needed to go on as if the program had never stopped."""

    leaves: list[NDArray[Any]]  # of the training state
    accuracy: float
    loader: ps.LoaderState


class Checkpoint:
    """A file that holds the newest `Saved`. It is replaced as a whole, so that it is never half written.

    Raises:
        ConfigError: no file can be written in that folder; known before the training begins.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "digits.npz"
        with _refused_if_it_fails(f"--checkpoint {folder}: no file can be written there"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass

    def load(self) -> Saved | None:
        """What was saved last; None if nothing was.

        Raises:
            StateError: the file cannot be read, or is no checkpoint.
        """
        try:
            with open(self._file, "rb") as file:
                arrays = np.load(file)
                leaves = [arrays[f"leaf{index}"] for index in range(len(arrays.files) - 2)]
                return Saved(leaves, float(arrays["accuracy"]), ps.LoaderState.decode(arrays["loader"].tobytes()))
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file makes NumPy and zipfile raise errors of many kinds
            why = error.strerror if isinstance(error, OSError) else error
            raise ps.StateError(
                f"--checkpoint: {self._file} is no checkpoint of this demo ({why}): remove it, or give another folder"
            ) from error

    def save(self, saved: Saved) -> None:
        """Replaces what was saved before.

        Raises:
            ConfigError: the file cannot be written; what was saved before is still there.
        """
        unfinished = self._file.with_suffix(".new.npz")
        arrays: dict[str, Any] = {f"leaf{index}": leaf for index, leaf in enumerate(saved.leaves)}
        with _refused_if_it_fails(f"--checkpoint: {self._file} cannot be written"):
            with open(unfinished, "wb") as file:
                np.savez(file, accuracy=saved.accuracy, loader=np.frombuffer(saved.loader.encode(), np.uint8), **arrays)
                file.flush()
                os.fsync(file.fileno())  # else the new name could come before the content
            unfinished.replace(self._file)


@contextlib.contextmanager
def _refused_if_it_fails(what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ps.ConfigError(f"{what}: {error.strerror or error}") from error


# --------------------------------------------------------------------------------------------------------------- the job


class Job:
    """A training run without its loop: what to do with a batch to learn from, with a held-out batch, and after an epoch."""

    def __init__(
        self, options: Options, mesh: Mesh, steps: int, display: Display, checkpoint: Checkpoint | None, saved: Saved | None
    ) -> None:
        optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, max(steps, 1)))
        parameters = new_parameters(options.seed)
        fresh = TrainState(parameters, optimizer.init(parameters))
        places = shardings(fresh, mesh)

        def loss(parameters: dict[str, jax.Array], batch: Batch) -> jax.Array:
            scores = logits(parameters, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()

        def learn(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
            value, slope = jax.value_and_grad(loss)(state.parameters, batch)
            change, optimizer_state = optimizer.update(slope, state.optimizer, state.parameters)
            parameters: Any = optax.apply_updates(state.parameters, change)
            return TrainState(parameters, optimizer_state), value

        def score(parameters: dict[str, jax.Array], batch: Batch) -> jax.Array:
            right = logits(parameters, batch["image"]).argmax(-1) == batch["label"]
            return jnp.stack([(right & batch["mask"]).sum(), batch["mask"].sum()])  # padding counts neither way

        if saved is not None:
            if [leaf.shape for leaf in saved.leaves] != [np.shape(leaf) for leaf in jax.tree.leaves(fresh)]:
                raise ps.StateError(f"--checkpoint {options.checkpoint}: what is saved there is another network: give another folder")
            fresh = jax.tree.unflatten(jax.tree.structure(fresh), saved.leaves)
        self.state: TrainState = jax.device_put(fresh, places)
        self.accuracy = saved.accuracy if saved else 0.0
        self._checkpoint = checkpoint
        self._checkpoint_every = options.checkpoint_every
        self._display = display
        self._learn = jax.jit(learn, donate_argnums=0, out_shardings=(places, NamedSharding(mesh, PartitionSpec())))
        self._score = jax.jit(score)
        self._loss: jax.Array | None = None  # of the last step
        self._scores: list[jax.Array] = []

    def learn(self, batch: Batch) -> jax.Array:
        """Starts one step. Returns what to wait for, so that one step and no more runs ahead of the loop."""
        before = self._loss
        if before is None:
            self._display.first_batch(batch)
        self.state, loss = self._learn(self.state, batch)
        self._loss = loss
        return loss if before is None else before

    def score(self, batch: Batch) -> None:
        """Starts counting the right answers of one held-out batch."""
        self._scores.append(self._score(self.state.parameters, batch))

    def end_epoch(self, epoch: int) -> None:
        right, total = (int(number) for number in np.sum([np.asarray(score) for score in self._scores], axis=0))
        self._scores.clear()
        self.accuracy = right / total
        self._display.epoch(epoch, float(np.asarray(self._loss)), right, total)

    def save(self, batches: ps.LoaderIterator) -> None:
        """Keeps where the training stands, now and then: the batches counted are those handed out, not those read ahead."""
        position = batches.position
        if self._checkpoint and position and (position.ends_epoch or (position.step + 1) % self._checkpoint_every == 0):
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]
            self._checkpoint.save(Saved(leaves, self.accuracy, batches.state()))


def train(job: Job, loader: ps.Loader, held_out: ps.Loader, display: Display) -> ps.Stats:
    with loader, held_out:
        batches = iter(loader)
        for batch in batches:
            job.learn(batch).block_until_ready()
            display.step()
            if (position := batches.position) and position.ends_epoch:
                for batch in held_out:
                    job.score(batch)
                job.end_epoch(position.epoch)
            job.save(batches)
        return batches.stats()


async def train_async(job: Job, loader: ps.Loader, held_out: ps.Loader, display: Display) -> ps.Stats:
    async with loader, held_out:
        batches = aiter(loader)
        async for batch in batches:
            await anyio.to_thread.run_sync(job.learn(batch).block_until_ready)  # the event loop stays free
            display.step()
            if (position := batches.position) and position.ends_epoch:
                async for batch in held_out:
                    job.score(batch)
                job.end_epoch(position.epoch)
            job.save(batches)
        return batches.stats()


# --------------------------------------------------------------------------------------------------------- what is shown


class Display:
    """Progress for a person: a bar where there is a terminal, and plain lines that read well in a file too."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
        self._console = console
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task("training", total=steps, completed=done)

    def line(self, text: str = "") -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self) -> None:
        self.bar.advance(self._task)

    def first_batch(self, batch: Batch) -> None:
        self.line(f"\nThe first batch, as it lies on the devices:\n{ps.describe(batch)}\n")

    def epoch(self, epoch: int, loss: float, right: int, total: int) -> None:
        self.line(f"epoch {epoch + 1:3}   loss {loss:6.4f}   held-out digits right: {right} of {total} ({right / total:.1%})")
        self.bar.update(self._task, description=f"training, {right / total:.1%} right")

    def end(self, job: Job, stats: ps.Stats, seconds: float) -> None:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(job.state.parameters):
            digest.update(np.asarray(leaf).tobytes())
        self.line(f"\n{stats.batches} steps in {seconds:.1f} s.")
        if stats.batches:
            waited = stats.stall_seconds / (stats.stall_seconds + stats.busy_seconds)
            self.line(f"The training loop waited for input {waited:.1%} of the time.")
        self.line(f"Fingerprint of the final parameters: {digest.hexdigest()[:16]}")
        if job.accuracy < ENOUGH:
            self.line(f"Failed: {job.accuracy:.1%} of the held-out digits are right, {ENOUGH:.0%} were expected.")


# ---------------------------------------------------------------------------------------------------------------- all of it


def use_virtual_devices() -> None:
    """Has the CPU backend, where it is the one in use, show eight devices, unless the user has said how many."""
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ
    if not chosen:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)


def loaders(options: Options, mesh: Mesh, data: tuple[Rows, Rows], state: ps.LoaderState | None) -> tuple[ps.Loader, ps.Loader]:
    """The loader of the batches to learn from, and that of the held-out ones, which is read once an epoch."""
    learn, held_out = data
    split = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in mesh.axis_names if axis != "model")))
    return (
        ps.Loader(
            learn,
            batch_size=options.batch_size,
            sharding=split,
            shuffle=True,
            seed=options.seed,
            epochs=options.epochs,
            transform=crop,
            device_transform=to_float,
            state=state,
        ),
        ps.Loader(held_out, batch_size=options.batch_size, sharding=split, remainder="pad", device_transform=to_float),
    )


def run(options: Options, console: Console | None = None) -> int:
    """Trains and reports. Returns the exit code: 0 where the held-out accuracy reaches `ENOUGH`, else 1."""
    use_virtual_devices()
    console = console or Console()
    mesh = ps.make_mesh(options.mesh)
    if HIDDEN % mesh.shape.get("model", 1):
        raise ps.ConfigError(
            f"--mesh: the axis model cuts {HIDDEN} units, which {mesh.shape['model']} devices cannot share: take a divisor"
        )
    data = digits(options.seed)
    steps = options.epochs * (len(data[0]["label"]) // options.batch_size)
    checkpoint = Checkpoint(options.checkpoint) if options.checkpoint else None
    saved = checkpoint.load() if checkpoint else None
    done = saved.loader.step if saved else 0
    loader, held_out = loaders(options, mesh, data, saved.loader if saved else None)
    display = Display(console, steps, done)
    device = jax.devices()[0]
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    display.line(f"{jax.device_count()} {device.platform} devices ({device.device_kind}), mesh {axes}")
    display.line(f"{options.epochs} epochs, {options.batch_size} rows a step, {steps} steps, {_loop_in_words(options)}")
    if done:
        display.line(f"going on from {options.checkpoint}, after step {done}")
    job = Job(options, mesh, steps, display, checkpoint, saved)
    started = time.perf_counter()
    with display.bar:
        if options.use_async:
            stats = anyio.run(train_async, job, loader, held_out, display, backend=options.backend)
        else:
            stats = train(job, loader, held_out, display)
    display.end(job, stats, time.perf_counter() - started)
    return 0 if job.accuracy >= ENOUGH else 1


def _loop_in_words(options: Options) -> str:
    return f"an async loop on {options.backend}" if options.use_async else "a plain loop"
