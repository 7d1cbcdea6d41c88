"""prefetchshard keeps the next sharded batches on the devices while the training step runs.

    import prefetchshard as ps

    for batch in ps.prefetch(my_iterator, NamedSharding(mesh, P("data"))):
        state = train_step(state, batch)

`Loader` reads arrays, datasets, iterables and async iterables, batches, shuffles and pads them; `prefetch` is the same around an
iterator that already yields batches. Where things are: README.md in the package's folder.
"""

from prefetchshard.base.config import HOST as HOST
from prefetchshard.base.config import Pad as Pad
from prefetchshard.base.config import PerDevice as PerDevice
from prefetchshard.base.config import Processes as Processes
from prefetchshard.base.errors import ArgumentError as ArgumentError
from prefetchshard.base.errors import BatchError as BatchError
from prefetchshard.base.errors import ConfigError as ConfigError
from prefetchshard.base.errors import LeafTypeError as LeafTypeError
from prefetchshard.base.errors import NarrowingError as NarrowingError
from prefetchshard.base.errors import PlacementError as PlacementError
from prefetchshard.base.errors import PrefetchError as PrefetchError
from prefetchshard.base.errors import PrefetchWarning as PrefetchWarning
from prefetchshard.base.errors import SourceError as SourceError
from prefetchshard.base.errors import StateError as StateError
from prefetchshard.base.errors import StuckThreadWarning as StuckThreadWarning
from prefetchshard.base.errors import UsedUpError as UsedUpError
from prefetchshard.base.position import Position as Position
from prefetchshard.base.specs import BatchSpec as BatchSpec
from prefetchshard.base.specs import LeafSpec as LeafSpec
from prefetchshard.benchmarking.benchmark import benchmark as benchmark
from prefetchshard.benchmarking.report import Benchmark as Benchmark
from prefetchshard.iterator import LoaderIterator as LoaderIterator
from prefetchshard.loader import Loader as Loader
from prefetchshard.loader import prefetch as prefetch
from prefetchshard.measuring.stats import Stats as Stats
from prefetchshard.resuming.loader_state import LoaderState as LoaderState
from prefetchshard.sharding.meshes import make_mesh as make_mesh
from prefetchshard.sharding.meshes import process_data_shard as process_data_shard
from prefetchshard.sources.asynchronous import from_this_loop as from_this_loop
from prefetchshard.sources.asynchronous import in_own_loop as in_own_loop
from prefetchshard.sources.device_arrays import OnDevice as OnDevice
from prefetchshard.sources.per_worker import per_worker as per_worker
from prefetchshard.sources.rebatch import rebatch as rebatch
from prefetchshard.telling.describe import describe as describe
from prefetchshard.telling.live import live as live

__version__ = "0.1.0"
