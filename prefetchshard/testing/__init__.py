"""What users test with: fakes that a test can own, and checks for sources of one's own.

`ManualClock` is time that moves when the test says so. Inside `poisoned_staging()` the staging memory of loaders turns to poison as soon
as it is released. `check_source` tells whether a source of your own keeps what a loader relies on.
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
