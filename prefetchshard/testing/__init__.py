"""Test tools for users: a fake clock, poisoned staging memory, and a conformance check for sources.

`ManualClock` is a clock that advances only when the test says so. Inside `poisoned_staging()` loaders overwrite staging memory with
poison as soon as it is released. `check_source` checks that your own source behaves as a loader requires.
"""

from prefetchshard.testing.fakes import POISON as POISON
from prefetchshard.testing.fakes import ManualClock as ManualClock
from prefetchshard.testing.fakes import PoisonCounts as PoisonCounts
from prefetchshard.testing.fakes import PoisonStaging as PoisonStaging
from prefetchshard.testing.fakes import SlotMisuseError as SlotMisuseError
from prefetchshard.testing.fakes import poisoned_staging as poisoned_staging
from prefetchshard.testing.fakes import staging_by as staging_by
from prefetchshard.testing.source_checks import SourceReport as SourceReport
from prefetchshard.testing.source_checks import check_source as check_source
