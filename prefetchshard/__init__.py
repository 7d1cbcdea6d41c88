"""prefetchshard keeps the next sharded batches on the devices while the training step runs.

    import prefetchshard as ps

    for batch in ps.prefetch(my_iterator, NamedSharding(mesh, P("data"))):
        state = train_step(state, batch)

`Loader` reads arrays, datasets, iterables and async iterables, batches, shuffles and pads them; `prefetch` is the same around an
iterator that already yields batches. Where things are: README.md in the package's folder.
"""

from prefetchshard.batches import BatchSpec as BatchSpec
from prefetchshard.batches import LeafSpec as LeafSpec
from prefetchshard.batches import Position as Position
from prefetchshard.config import HOST as HOST
from prefetchshard.config import Pad as Pad
from prefetchshard.config import PerDevice as PerDevice
from prefetchshard.errors import BatchError as BatchError
from prefetchshard.errors import ConfigError as ConfigError
from prefetchshard.errors import LeafTypeError as LeafTypeError
from prefetchshard.errors import NarrowingError as NarrowingError
from prefetchshard.errors import PlacementError as PlacementError
from prefetchshard.errors import PrefetchError as PrefetchError
from prefetchshard.errors import PrefetchWarning as PrefetchWarning
from prefetchshard.errors import SourceError as SourceError
from prefetchshard.errors import StateError as StateError
from prefetchshard.errors import StuckThreadWarning as StuckThreadWarning
from prefetchshard.errors import UsedUpError as UsedUpError
from prefetchshard.loader import Loader as Loader
from prefetchshard.loader import LoaderIterator as LoaderIterator
from prefetchshard.loader import prefetch as prefetch
from prefetchshard.meshes import make_mesh as make_mesh
from prefetchshard.meshes import process_data_shard as process_data_shard
from prefetchshard.report import describe as describe
from prefetchshard.sources.asynchronous import from_this_loop as from_this_loop
from prefetchshard.sources.device_arrays import OnDevice as OnDevice
from prefetchshard.state import LoaderState as LoaderState
from prefetchshard.statistics import Stats as Stats

__version__ = "0.1.0"
